// Binds the linear kernels to torch: operators through the stable ABI, and the C functions that compiled graphs call.
#include "linear/linear.h"
#include "torch_bindings/torch_view.h"

using namespace infer_native;

namespace {



void expect_input(const View& x, int64_t columns) {
  STD_TORCH_CHECK(x.dtype == aoti_torch_dtype_float32(), "expected x float32, got another dtype");
  STD_TORCH_CHECK(x.dim > 0 && x.sizes[x.dim - 1] == columns, "expected x with ", columns, " columns, got ",
                  x.dim ? x.sizes[x.dim - 1] : 0);
}

// Allocates the result [..., N] of an input [..., columns]; returns it and its number of rows.
struct Output {
  AtenTensorHandle handle;
  float* data;
  int64_t rows;

  Output(const View& x, int64_t features) : rows(1) {
    int64_t sizes[16];
    for (int64_t i = 0; i + 1 < x.dim; ++i) rows *= sizes[i] = x.sizes[i];
    sizes[x.dim - 1] = features;
    handle = new_floats(sizes, x.dim);
    data = View(handle).as<float>();
  }
};

AtenTensorHandle lut4(const View& given, const View& codes, const View& scale, const View& table,
                      const View& row_scale, const std::optional<View>& bias, int64_t out_features) {
  STD_TORCH_CHECK(codes.dim == 3 && codes.sizes[0] == (out_features + BLOCK_ROWS - 1) / BLOCK_ROWS,
                  "codes do not hold ", out_features, " rows");
  const int64_t groups = codes.sizes[1], columns = groups * GROUP;
  STD_TORCH_CHECK(scale.dim == 3 && (scale.sizes[1] == groups || scale.sizes[1] == groups * FINE_SCALES),
                  "expected ", groups, " or ", groups * FINE_SCALES, " scales of a block");
  expect_input(given, columns);
  std::optional<Tensor> holder;
  const View x = given.dense(holder);
  const float* added = floats(bias, out_features, "bias");
  const Output y(x, out_features);
  const Lut4Weight weight{codes.as<const uint8_t>(), scale.as<const int8_t>(), table.as<const int8_t>(),
                          row_scale.as<const float>(), out_features, columns,
                          groups ? scale.sizes[1] / groups : 1};
  if (y.rows && out_features) linear_lut4(x.as<const float>(), y.rows, weight, added, y.data);
  return y.handle;
}

AtenTensorHandle int8(const View& given, const View& codes, const View& scale, const std::optional<View>& row_sum,
                      InputGrid grid, const std::optional<View>& bias, int64_t out_features, int64_t in_features,
                      bool weight_only) {
  STD_TORCH_CHECK(codes.dim == 4 && codes.sizes[0] == (out_features + BLOCK_ROWS - 1) / BLOCK_ROWS &&
                      codes.sizes[1] == (in_features + 3) / 4,
                  "codes do not hold ", out_features, " rows of ", in_features, " columns");
  expect_input(given, in_features);
  std::optional<Tensor> holder;
  const View x = given.dense(holder);
  const float* added = floats(bias, out_features, "bias");
  const Output y(x, out_features);
  const Int8Weight weight{codes.as<const int8_t>(), scale.as<const float>(), out_features, in_features,
                          row_sum ? row_sum->as<const int32_t>() : nullptr};
  if (y.rows && out_features) {
    if (weight_only)
      linear_int8_weight(x.as<const float>(), y.rows, weight, added, y.data);
    else
      linear_int8(x.as<const float>(), y.rows, weight, grid, added, y.data);
  }
  return y.handle;
}

Tensor op_lut4(Tensor x, Tensor codes, Tensor scale, Tensor table, Tensor row_scale, std::optional<Tensor> bias,
               int64_t out_features) {
  return Tensor(lut4(View(x.get()), View(codes.get()), View(scale.get()), View(table.get()), View(row_scale.get()),
                     optional_view(bias), out_features));
}

Tensor op_int8(Tensor x, Tensor codes, Tensor scale, Tensor row_sum, std::optional<Tensor> x_scale, std::optional<Tensor> bias,
               int64_t out_features, int64_t in_features) {
  const InputGrid grid{floats(optional_view(x_scale), 1, "x_scale"), nullptr};
  return Tensor(int8(View(x.get()), View(codes.get()), View(scale.get()), View(row_sum.get()), grid, optional_view(bias),
                     out_features, in_features, false));
}

Tensor op_int8_balanced(Tensor x, Tensor codes, Tensor scale, Tensor row_sum, Tensor x_multiplier, std::optional<Tensor> bias,
                        int64_t out_features, int64_t in_features) {
  const InputGrid grid{nullptr, floats(View(x_multiplier.get()), in_features, "x_multiplier")};
  return Tensor(int8(View(x.get()), View(codes.get()), View(scale.get()), View(row_sum.get()), grid, optional_view(bias),
                     out_features, in_features, false));
}

Tensor op_int8_weight(Tensor x, Tensor codes, Tensor scale, std::optional<Tensor> bias, int64_t out_features,
                      int64_t in_features) {
  return Tensor(int8(View(x.get()), View(codes.get()), View(scale.get()), std::nullopt, {}, optional_view(bias),
                     out_features, in_features, true));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infer, CPU, m) {
  m.impl("linear_lut4_packed", TORCH_BOX(&op_lut4));
  m.impl("linear_int8_packed", TORCH_BOX(&op_int8));
  m.impl("linear_int8_balanced_packed", TORCH_BOX(&op_int8_balanced));
  m.impl("linear_int8_weight_packed", TORCH_BOX(&op_int8_weight));
}

INFER_SHIM aoti_torch_cpu_linear_lut4_packed(AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scale,
                                             AtenTensorHandle table, AtenTensorHandle row_scale,
                                             AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* ret0) {
  return guarded("linear_lut4_packed", [&] {
    *ret0 = lut4(View(x), View(codes), View(scale), View(table), View(row_scale), optional_view(bias), out_features);
  });
}

INFER_SHIM aoti_torch_cpu_linear_int8_packed(AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scale,
                                             AtenTensorHandle row_sum, AtenTensorHandle* x_scale, AtenTensorHandle* bias, int64_t out_features,
                                             int64_t in_features, AtenTensorHandle* ret0) {
  return guarded("linear_int8_packed", [&] {
    const InputGrid grid{floats(optional_view(x_scale), 1, "x_scale"), nullptr};
    *ret0 = int8(View(x), View(codes), View(scale), View(row_sum), grid, optional_view(bias), out_features, in_features,
                 false);
  });
}

INFER_SHIM aoti_torch_cpu_linear_int8_balanced_packed(AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scale,
                                                      AtenTensorHandle row_sum, AtenTensorHandle x_multiplier,
                                                      AtenTensorHandle* bias, int64_t out_features, int64_t in_features,
                                                      AtenTensorHandle* ret0) {
  return guarded("linear_int8_balanced_packed", [&] {
    const InputGrid grid{nullptr, floats(View(x_multiplier), in_features, "x_multiplier")};
    *ret0 = int8(View(x), View(codes), View(scale), View(row_sum), grid, optional_view(bias), out_features, in_features,
                 false);
  });
}

INFER_SHIM aoti_torch_cpu_linear_int8_weight_packed(AtenTensorHandle x, AtenTensorHandle codes,
                                                    AtenTensorHandle scale, AtenTensorHandle* bias,
                                                    int64_t out_features, int64_t in_features,
                                                    AtenTensorHandle* ret0) {
  return guarded("linear_int8_weight_packed", [&] {
    *ret0 = int8(View(x), View(codes), View(scale), std::nullopt, {}, optional_view(bias), out_features, in_features,
                 true);
  });
}

extern "C" __attribute__((visibility("default"))) void infer_pack_lut4(
    const uint8_t* codes, int bits, const float* table, int64_t tables, const int8_t* scale, const float* row_scale,
    int64_t rows, int64_t columns, int64_t scales, uint8_t* out_codes, int8_t* out_scale, int8_t* out_table,
    float* out_row_scale) {
  pack_lut4(codes, bits, table, tables, scale, row_scale, rows, columns, scales, out_codes, out_scale, out_table,
            out_row_scale);
}

extern "C" __attribute__((visibility("default"))) void infer_pack_int8(const int8_t* codes, const float* scale,
                                                                       int64_t rows, int64_t columns,
                                                                       int8_t* out_codes, float* out_scale,
                                                                       int32_t* out_row_sum) {
  pack_int8(codes, scale, rows, columns, out_codes, out_scale, out_row_sum);
}
