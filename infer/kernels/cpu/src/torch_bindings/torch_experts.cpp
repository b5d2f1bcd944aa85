// Binds the layers of experts to torch: operators through the stable ABI, and the C functions that compiled graphs call.
#include "linear/experts.h"
#include "torch_bindings/torch_view.h"

using namespace infer_native;

namespace {

// Checked operands x [R, columns] and expert int64 [R * top_k], and the new result tensor [R * top_k, features].
struct Call {
  std::optional<Tensor> holders[2];
  View x, expert;
  ExpertRouting routing;
  AtenTensorHandle result;
  float* y;

  Call(const View& given, const View& chosen, int64_t blocks, int64_t features, int64_t columns, int64_t top_k)
      : x(given.dense(holders[0])), expert(chosen.dense(holders[1])) {
    STD_TORCH_CHECK(x.dtype == aoti_torch_dtype_float32() && x.dim == 2 && x.sizes[1] == columns,
                    "expected x float32 [rows, ", columns, "]");
    STD_TORCH_CHECK(expert.dtype == aoti_torch_dtype_int64() && expert.dim == 1 && expert.numel == x.sizes[0] * top_k,
                    "expected int64 experts of ", x.sizes[0] * top_k, " assignments, got ", expert.numel);
    STD_TORCH_CHECK(features > 0 && blocks % packed_blocks(features) == 0, "codes do not hold experts of ", features, " rows");
    routing = {expert.as<const int64_t>(), x.sizes[0], top_k, blocks / packed_blocks(features)};
    for (int64_t i = 0; i < routing.assignments(); ++i)
      STD_TORCH_CHECK(routing.expert[i] >= 0 && routing.expert[i] < routing.experts, "expert ", routing.expert[i], " is not in 0..",
                      routing.experts - 1);
    const int64_t sizes[2] = {routing.assignments(), features};
    result = new_floats(sizes, 2);
    y = View(result).as<float>();
  }
};

AtenTensorHandle lut4(const View& x, const View& expert, const View& codes, const View& scale, const View& table,
                      const View& row_scale, int64_t features, int64_t top_k) {
  const int64_t groups = codes.sizes[1];
  STD_TORCH_CHECK(codes.dim == 3 && scale.dim == 3 && (scale.sizes[1] == groups || scale.sizes[1] == groups * FINE_SCALES),
                  "expected ", groups, " or ", groups * FINE_SCALES, " scales of a block");
  const Call call(x, expert, codes.sizes[0], features, groups * GROUP, top_k);
  experts_lut4(call.x.as<const float>(), call.routing,
               {codes.as<const uint8_t>(), scale.as<const int8_t>(), table.as<const int8_t>(), row_scale.as<const float>(),
                features, groups * GROUP, groups ? scale.sizes[1] / groups : 1},
               call.y);
  return call.result;
}

AtenTensorHandle int8(const View& x, const View& expert, const View& codes, const View& scale,
                      const std::optional<View>& row_sum, int64_t features, int64_t columns, int64_t top_k) {
  STD_TORCH_CHECK(codes.dim == 4 && codes.sizes[1] == (columns + 3) / 4, "codes do not hold rows of ", columns, " columns");
  const Call call(x, expert, codes.sizes[0], features, columns, top_k);
  const Int8Weight weight{codes.as<const int8_t>(), scale.as<const float>(), features, columns,
                          row_sum ? row_sum->as<const int32_t>() : nullptr};
  (row_sum ? experts_int8 : experts_int8_weight)(call.x.as<const float>(), call.routing, weight, call.y);
  return call.result;
}

Tensor op_lut4(Tensor x, Tensor expert, Tensor codes, Tensor scale, Tensor table, Tensor row_scale, int64_t features,
               int64_t top_k) {
  return Tensor(lut4(View(x.get()), View(expert.get()), View(codes.get()), View(scale.get()), View(table.get()),
                     View(row_scale.get()), features, top_k));
}

Tensor op_int8(Tensor x, Tensor expert, Tensor codes, Tensor scale, Tensor row_sum, int64_t features, int64_t columns,
               int64_t top_k) {
  return Tensor(int8(View(x.get()), View(expert.get()), View(codes.get()), View(scale.get()), View(row_sum.get()), features,
                     columns, top_k));
}

Tensor op_int8_weight(Tensor x, Tensor expert, Tensor codes, Tensor scale, int64_t features, int64_t columns, int64_t top_k) {
  return Tensor(int8(View(x.get()), View(expert.get()), View(codes.get()), View(scale.get()), std::nullopt, features, columns,
                     top_k));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infer, CPU, m) {
  m.impl("linear_experts_lut4_packed", TORCH_BOX(&op_lut4));
  m.impl("linear_experts_int8_packed", TORCH_BOX(&op_int8));
  m.impl("linear_experts_int8_weight_packed", TORCH_BOX(&op_int8_weight));
}

INFER_SHIM aoti_torch_cpu_linear_experts_lut4_packed(AtenTensorHandle x, AtenTensorHandle expert, AtenTensorHandle codes,
                                                     AtenTensorHandle scale, AtenTensorHandle table,
                                                     AtenTensorHandle row_scale, int64_t features, int64_t top_k,
                                                     AtenTensorHandle* ret0) {
  return guarded("linear_experts_lut4_packed", [&] {
    *ret0 = lut4(View(x), View(expert), View(codes), View(scale), View(table), View(row_scale), features, top_k);
  });
}

INFER_SHIM aoti_torch_cpu_linear_experts_int8_packed(AtenTensorHandle x, AtenTensorHandle expert, AtenTensorHandle codes,
                                                     AtenTensorHandle scale, AtenTensorHandle row_sum, int64_t features,
                                                     int64_t columns, int64_t top_k, AtenTensorHandle* ret0) {
  return guarded("linear_experts_int8_packed", [&] {
    *ret0 = int8(View(x), View(expert), View(codes), View(scale), View(row_sum), features, columns, top_k);
  });
}

INFER_SHIM aoti_torch_cpu_linear_experts_int8_weight_packed(AtenTensorHandle x, AtenTensorHandle expert,
                                                            AtenTensorHandle codes, AtenTensorHandle scale, int64_t features,
                                                            int64_t columns, int64_t top_k, AtenTensorHandle* ret0) {
  return guarded("linear_experts_int8_weight_packed", [&] {
    *ret0 = int8(View(x), View(expert), View(codes), View(scale), std::nullopt, features, columns, top_k);
  });
}
