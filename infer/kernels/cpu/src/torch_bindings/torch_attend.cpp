// Binds attention to torch: the operator, and the C function that compiled graphs call.
#include <cstring>
#include <vector>

#include "torch_bindings/attend_check.h"
#include "torch_bindings/torch_view.h"

using namespace infer_native;

namespace {

// Tensor described by address, sizes and strides.
struct Strided {
  void* data;
  const int64_t *sizes, *strides;
  int32_t dtype;

  explicit Strided(AtenTensorHandle tensor) {
    int64_t *given_sizes, *given_strides;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &given_sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &given_strides));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    sizes = given_sizes, strides = given_strides;
  }

  template <typename T>
  const T* dense(int64_t count, int32_t type, const char* name) const {
    STD_TORCH_CHECK(dtype == type && sizes[0] == count && (count < 2 || strides[0] == 1), "expected ", name, " [", count,
                    "] dense, got [", sizes[0], "]");
    return static_cast<const T*>(data);
  }
};

Number number_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return Number::FLOAT32;
  if (dtype == aoti_torch_dtype_float16()) return Number::FLOAT16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_bfloat16(), "expected query, key and value float32, float16 or bfloat16");
  return Number::BFLOAT16;
}

// Returns a view of [tokens, heads, dim]; of a copy owned by `holder` where the last dimension is not dense.
Heads heads_of(AtenTensorHandle tensor, int64_t tokens, int64_t heads, int64_t dim, int32_t dtype,
               std::optional<Tensor>& holder, const char* name) {
  Strided x(tensor);
  STD_TORCH_CHECK(x.dtype == dtype && x.sizes[0] == tokens && x.sizes[1] == heads && x.sizes[2] == dim, "expected ", name,
                  " [", tokens, ", ", heads, ", ", dim, "] of the dtype of the query");
  if (dim > 1 && x.strides[2] != 1) {
    AtenTensorHandle shared;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &shared));
    holder = torch::stable::contiguous(Tensor(shared));
    x = Strided(holder->get());
  }
  return {x.data, x.strides[0], x.strides[1]};
}

// Sets the ALiBi slopes, or with two dimensions a bias by distance; bfloat16 slopes also round the bias to bfloat16.
void set_slopes(AttendArgs& args, AtenTensorHandle tensor, std::vector<float>& widened) {
  STD_TORCH_CHECK(args.sinks == nullptr, "ALiBi together with sinks");
  const Strided slopes(tensor);
  int64_t dims;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dims));
  if (dims == 2) {
    args.distances = slopes.sizes[1];
    STD_TORCH_CHECK(slopes.dtype == aoti_torch_dtype_float32() && slopes.sizes[0] == args.query_heads && args.distances > 0 &&
                        (args.query_heads < 2 || slopes.strides[0] == args.distances) &&
                        (args.distances < 2 || slopes.strides[1] == 1),
                    "expected slopes float32 [", args.query_heads, ", distances], dense");
    args.bias = static_cast<const float*>(slopes.data);
    return;
  }
  args.rounded = slopes.dtype == aoti_torch_dtype_bfloat16();
  if (!args.rounded) {
    args.slopes = slopes.dense<float>(args.query_heads, aoti_torch_dtype_float32(), "slopes");
    return;
  }
  const auto* const halves = slopes.dense<uint16_t>(args.query_heads, aoti_torch_dtype_bfloat16(), "slopes");
  for (int64_t h = 0; h < args.query_heads; ++h) {
    const uint32_t bits = static_cast<uint32_t>(halves[h]) << 16;
    widened.push_back(0);
    std::memcpy(&widened.back(), &bits, sizeof bits);
  }
  args.slopes = widened.data();
}

AtenTensorHandle attend_native(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle cache,
                               AtenTensorHandle slots, AtenTensorHandle table, AtenTensorHandle starts,
                               AtenTensorHandle lengths, AtenTensorHandle* sinks, int64_t layer, int64_t page,
                               int64_t dtype, double scale, int64_t window, double softcap, AtenTensorHandle* slopes,
                               int64_t chunk) {
  const Strided q(query), kv(key), pages(cache), blocks(table), seqs(lengths);
  const int64_t tokens = q.sizes[0], dim = q.sizes[2];
  AttendArgs args{};
  args.tokens = tokens, args.query_heads = q.sizes[1], args.kv_heads = kv.sizes[1], args.head_dim = dim;
  args.type = number_of(q.dtype);
  STD_TORCH_CHECK(dtype >= 0 && dtype <= 3 && page > 0 && args.query_heads % args.kv_heads == 0, "expected a cache dtype of 0..3 and whole groups of heads");
  args.cache_type = static_cast<Number>(dtype), args.page = page;
  std::optional<Tensor> kept[4];
  args.query = heads_of(query, tokens, args.query_heads, dim, q.dtype, kept[0], "query");
  args.key = heads_of(key, tokens, args.kv_heads, dim, q.dtype, kept[1], "key");
  args.value = heads_of(value, tokens, args.kv_heads, dim, q.dtype, kept[2], "value");

  STD_TORCH_CHECK(pages.dtype == aoti_torch_dtype_uint8() && pages.strides[2] == 1 && pages.strides[1] == pages.sizes[2] &&
                      layer >= 0 && layer < pages.sizes[0],
                  "expected kv_cache uint8 [layers, pages, page_bytes], dense");
  args.page_bytes = pages.strides[1];
  args.pages = static_cast<uint8_t*>(pages.data) + layer * pages.strides[0];
  const int64_t size = dtype == 0 ? 4 : dtype == 3 ? 1 : 2;
  const int64_t needed = 2 * args.kv_heads * page * (dim * size + (dtype == 3 ? 4 : 0));
  STD_TORCH_CHECK(pages.sizes[2] >= needed, "pages have ", pages.sizes[2], " bytes, needed ", needed);

  args.sequences = seqs.sizes[0], args.blocks = blocks.sizes[1];
  args.slot_mapping = Strided(slots).dense<int64_t>(tokens, aoti_torch_dtype_int64(), "slot_mapping");
  args.query_start = Strided(starts).dense<int32_t>(args.sequences + 1, aoti_torch_dtype_int32(), "query_start");
  args.seq_lens = seqs.dense<int32_t>(args.sequences, aoti_torch_dtype_int32(), "seq_lens");
  STD_TORCH_CHECK(blocks.dtype == aoti_torch_dtype_int32() && blocks.sizes[0] == args.sequences &&
                      (blocks.sizes[0] < 2 || blocks.strides[0] == args.blocks) && (args.blocks < 2 || blocks.strides[1] == 1),
                  "expected block_table int32 [", args.sequences, ", blocks], dense");
  args.block_table = static_cast<const int32_t*>(blocks.data);
  if (sinks != nullptr) args.sinks = Strided(*sinks).dense<float>(args.query_heads, aoti_torch_dtype_float32(), "sinks");
  args.scale = static_cast<float>(scale), args.window = window, args.softcap = static_cast<float>(softcap);
  args.chunk = chunk;
  std::vector<float> widened;
  if (slopes != nullptr) set_slopes(args, *slopes, widened);
  check_pages(args, pages.sizes[1]);

  const int64_t sizes[3] = {tokens, args.query_heads, dim}, strides[3] = {args.query_heads * dim, dim, 1};
  AtenTensorHandle out;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(3, sizes, strides, q.dtype, aoti_torch_device_type_cpu(), 0, &out));
  args.out = {Strided(out).data, strides[0], strides[1]};
  attend(args);
  return out;
}

Tensor op_attend(Tensor query, Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping, Tensor block_table,
                 Tensor query_start, Tensor seq_lens, std::optional<Tensor> sinks, int64_t layer, int64_t page,
                 int64_t dtype, double scale, int64_t window, double softcap, std::optional<Tensor> slopes, int64_t chunk) {
  AtenTensorHandle sink = sinks ? sinks->get() : nullptr, slope = slopes ? slopes->get() : nullptr;
  return Tensor(attend_native(query.get(), key.get(), value.get(), kv_cache.get(), slot_mapping.get(), block_table.get(),
                              query_start.get(), seq_lens.get(), sinks ? &sink : nullptr, layer, page, dtype, scale,
                              window, softcap, slopes ? &slope : nullptr, chunk));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infer, CPU, m) { m.impl("attend_native", TORCH_BOX(&op_attend)); }

INFER_SHIM aoti_torch_cpu_attend_native(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                        AtenTensorHandle kv_cache, AtenTensorHandle slot_mapping,
                                        AtenTensorHandle block_table, AtenTensorHandle query_start,
                                        AtenTensorHandle seq_lens, AtenTensorHandle* sinks, int64_t layer, int64_t page,
                                        int64_t dtype, double scale, int64_t window, double softcap,
                                        AtenTensorHandle* slopes, int64_t chunk, AtenTensorHandle* ret0) {
  return guarded("attend_native", [&] {
    *ret0 = attend_native(query, key, value, kv_cache, slot_mapping, block_table, query_start, seq_lens, sinks, layer, page,
                          dtype, scale, window, softcap, slopes, chunk);
  });
}
