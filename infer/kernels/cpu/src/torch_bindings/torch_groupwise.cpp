// Binds the layers on groupwise codes to torch: operators through the stable ABI, and the C functions of compiled graphs.
#include "linear/experts.h"
#include "torch_bindings/torch_view.h"

using namespace infer_native;

namespace {

struct Operands {
  GroupwiseWeight weight;
  int64_t blocks;

  // `features`: output features of one expert; with several experts the weight describes the first.
  Operands(const View& codes, const View& scale, const View& table, int64_t layout, int64_t features) {
    STD_TORCH_CHECK(codes.dim == 3 && scale.dim == 2 && table.dim == 2, "expected codes of 3 and scale and table of 2 dimensions");
    const int64_t columns = codes.sizes[1] * GROUP;
    blocks = codes.sizes[0];
    STD_TORCH_CHECK(known_layout(layout, columns), "no layout ", layout, " of ", columns, " columns");
    STD_TORCH_CHECK(codes.sizes[2] == GroupwiseLayout(layout, columns).group_bytes() && scale.sizes[0] == blocks && table.sizes[0] == blocks &&
                        scale.sizes[1] == GroupwiseLayout(layout, columns).record_bytes,
                    "codes, scale and table do not fit each other");
    STD_TORCH_CHECK(features > 0 && blocks % packed_blocks(features) == 0, "codes do not hold ", features, " rows");
    weight = {codes.as<const uint8_t>(), scale.as<const uint8_t>(), table.as<const int8_t>(), features, columns, layout};
  }
};

AtenTensorHandle linear(const View& given, const View& codes, const View& scale, const View& table,
                        const std::optional<View>& bias, int64_t layout, int64_t out_features) {
  const Operands operands(codes, scale, table, layout, out_features);
  STD_TORCH_CHECK(operands.blocks == packed_blocks(out_features), "codes do not hold ", out_features, " rows");
  STD_TORCH_CHECK(given.dtype == aoti_torch_dtype_float32() && given.dim > 0 &&
                      given.sizes[given.dim - 1] == operands.weight.columns,
                  "expected x float32 with ", operands.weight.columns, " columns");
  std::optional<Tensor> holder;
  const View x = given.dense(holder);
  const float* added = floats(bias, out_features, "bias");
  int64_t sizes[16], rows = 1;
  for (int64_t i = 0; i + 1 < x.dim; ++i) rows *= sizes[i] = x.sizes[i];
  sizes[x.dim - 1] = out_features;
  AtenTensorHandle made = new_floats(sizes, x.dim);
  if (rows) linear_groupwise(x.as<const float>(), rows, operands.weight, added, View(made).as<float>());
  return made;
}

AtenTensorHandle experts(const View& given, const View& chosen, const View& codes, const View& scale, const View& table,
                         int64_t layout, int64_t features, int64_t top_k) {
  const Operands operands(codes, scale, table, layout, features);
  std::optional<Tensor> holders[2];
  const View x = given.dense(holders[0]), expert = chosen.dense(holders[1]);
  STD_TORCH_CHECK(x.dtype == aoti_torch_dtype_float32() && x.dim == 2 && x.sizes[1] == operands.weight.columns,
                  "expected x float32 [rows, ", operands.weight.columns, "]");
  STD_TORCH_CHECK(expert.dtype == aoti_torch_dtype_int64() && expert.dim == 1 && expert.numel == x.sizes[0] * top_k,
                  "expected int64 experts of ", x.sizes[0] * top_k, " assignments, got ", expert.numel);
  const ExpertRouting routing{expert.as<const int64_t>(), x.sizes[0], top_k, operands.blocks / packed_blocks(features)};
  for (int64_t i = 0; i < routing.assignments(); ++i)
    STD_TORCH_CHECK(routing.expert[i] >= 0 && routing.expert[i] < routing.experts, "expert ", routing.expert[i], " is not in 0..",
                    routing.experts - 1);
  const int64_t sizes[2] = {routing.assignments(), features};
  AtenTensorHandle made = new_floats(sizes, 2);
  experts_groupwise(x.as<const float>(), routing, operands.weight, View(made).as<float>());
  return made;
}

Tensor op_linear(Tensor x, Tensor codes, Tensor scale, Tensor table, std::optional<Tensor> bias, int64_t layout,
                 int64_t out_features) {
  return Tensor(linear(View(x.get()), View(codes.get()), View(scale.get()), View(table.get()), optional_view(bias), layout,
                       out_features));
}

Tensor op_experts(Tensor x, Tensor expert, Tensor codes, Tensor scale, Tensor table, int64_t layout, int64_t features,
                  int64_t top_k) {
  return Tensor(experts(View(x.get()), View(expert.get()), View(codes.get()), View(scale.get()), View(table.get()), layout,
                        features, top_k));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infer, CPU, m) {
  m.impl("linear_groupwise_packed", TORCH_BOX(&op_linear));
  m.impl("linear_experts_groupwise_packed", TORCH_BOX(&op_experts));
}

INFER_SHIM aoti_torch_cpu_linear_groupwise_packed(AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scale,
                                                  AtenTensorHandle table, AtenTensorHandle* bias, int64_t layout,
                                                  int64_t out_features, AtenTensorHandle* ret0) {
  return guarded("linear_groupwise_packed", [&] {
    *ret0 = linear(View(x), View(codes), View(scale), View(table), optional_view(bias), layout, out_features);
  });
}

INFER_SHIM aoti_torch_cpu_linear_experts_groupwise_packed(AtenTensorHandle x, AtenTensorHandle expert,
                                                          AtenTensorHandle codes, AtenTensorHandle scale,
                                                          AtenTensorHandle table, int64_t layout, int64_t features,
                                                          int64_t top_k, AtenTensorHandle* ret0) {
  return guarded("linear_experts_groupwise_packed", [&] {
    *ret0 = experts(View(x), View(expert), View(codes), View(scale), View(table), layout, features, top_k);
  });
}

extern "C" __attribute__((visibility("default"))) void infer_pack_planes(const uint8_t* codes, int bits, int add, int planes,
                                                                         int64_t rows, int64_t columns, uint8_t* out) {
  pack_planes(codes, bits, add, planes, rows, columns, out);
}
