// Binds the state layers to torch: the operators, and the C functions that compiled graphs call.
#include <cstring>

#include "state/state.h"
#include "torch_bindings/torch_view.h"

using namespace infer_native;

namespace {

// Operand as dense float32 of the given sizes; owns a copy where one was needed.
struct Operand {
  std::optional<Tensor> holder;
  View view;

  Operand(AtenTensorHandle tensor, const char* name, int64_t dim) : view(View(tensor).dense(holder)) {
    STD_TORCH_CHECK(view.dtype == aoti_torch_dtype_float32() && view.dim == dim, "expected ", name, " float32 of ", dim,
                    " dimensions");
  }
  void sized(const char* name, int64_t numel) const {
    STD_TORCH_CHECK(view.numel == numel, "expected ", name, " of ", numel, " numbers, got ", view.numel);
  }
  const float* data() const { return view.as<const float>(); }
  int64_t size(int i) const { return view.sizes[i]; }
};

// Checked rows and segments of a call.
StateRows rows_of(AtenTensorHandle cache, const View& segments, int64_t offset, int64_t floats, int64_t tokens) {
  const View given(cache);
  STD_TORCH_CHECK(given.dtype == aoti_torch_dtype_float32() && given.dim == 2 && given.contiguous(),
                  "expected state_cache float32 [rows, floats], dense");
  STD_TORCH_CHECK(segments.dtype == aoti_torch_dtype_int64() && segments.dim == 2 && segments.sizes[1] == 4,
                  "expected segments int64 [segments, 4]");
  StateRows state{given.as<float>(), given.sizes[0], given.sizes[1], offset, segments.as<const int64_t>(), segments.sizes[0]};
  bool used = false;
  for (int64_t s = 0; s < state.count; ++s) {
    const int64_t read = state.segments[4 * s + 2], written = state.segments[4 * s + 3];
    used = used || read >= 0 || written >= 0;
    STD_TORCH_CHECK(read < state.rows && written < state.rows, "expected a row of ", state.rows, ", got ", read, " and ", written);
    STD_TORCH_CHECK(state.first(s) >= 0 && state.first(s) <= state.end(s) && state.end(s) <= tokens, "segment ", s,
                    " is not within ", tokens, " tokens");
  }
  STD_TORCH_CHECK(!used || (offset >= 0 && offset + floats <= state.row_floats), "expected rows of ", offset + floats,
                  " floats, got ", state.row_floats);
  return state;
}

// Allocates the result, with zeros where some token belongs to no segment.
float* new_out(const View& like, const StateRows& state, int64_t tokens, AtenTensorHandle* out) {
  *out = new_floats(like.sizes, like.dim);
  float* const data = View(*out).as<float>();
  int64_t covered = 0;
  for (int64_t s = 0; s < state.count; ++s) covered += state.end(s) - state.first(s);
  if (covered != tokens) std::memset(data, 0, static_cast<size_t>(like.numel) * sizeof(float));
  return data;
}

View dense_segments(AtenTensorHandle segments, std::optional<Tensor>& holder) { return View(segments).dense(holder); }

AtenTensorHandle conv_native(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle cache,
                             AtenTensorHandle segments, int64_t offset, bool silu) {
  const Operand input(x, "x", 2), taps(weight, "weight", 2);
  ConvArgs args{};
  args.tokens = input.size(0), args.channels = input.size(1), args.taps = taps.size(1), args.silu = silu;
  taps.sized("weight", args.channels * args.taps);
  STD_TORCH_CHECK(args.taps >= 1 && args.taps <= MAX_TAPS, "expected 1 to ", MAX_TAPS, " taps, got ", args.taps);
  std::optional<Operand> added;
  if (bias != nullptr) added.emplace(*bias, "bias", 1), added->sized("bias", args.channels);
  std::optional<Tensor> kept;
  args.state = rows_of(cache, dense_segments(segments, kept), offset, (args.taps - 1) * args.channels, args.tokens);
  args.x = input.data(), args.weight = taps.data(), args.bias = added ? added->data() : nullptr;
  AtenTensorHandle out;
  args.out = new_out(input.view, args.state, args.tokens, &out);
  causal_conv(args);
  return out;
}

AtenTensorHandle delta_native(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle decay,
                              AtenTensorHandle beta, AtenTensorHandle cache, AtenTensorHandle segments, int64_t offset) {
  const Operand q(query, "query", 3), k(key, "key", 3), v(value, "value", 3), d(decay, "decay", 2), b(beta, "beta", 2);
  DeltaArgs args{};
  args.tokens = v.size(0), args.heads = v.size(1), args.width = v.size(2), args.key_heads = q.size(1), args.key_width = q.size(2);
  for (const Operand* each : {&q, &k}) each->sized("query and key", args.tokens * args.key_heads * args.key_width);
  for (const Operand* each : {&d, &b}) each->sized("decay and beta", args.tokens * args.heads);
  STD_TORCH_CHECK(args.key_heads > 0 && args.heads % args.key_heads == 0 && args.key_width <= MAX_STATES,
                  "expected whole groups of heads, and keys of at most ", MAX_STATES);
  std::optional<Tensor> kept;
  args.state = rows_of(cache, dense_segments(segments, kept), offset, args.heads * args.key_width * args.width, args.tokens);
  args.query = q.data(), args.key = k.data(), args.value = v.data(), args.decay = d.data(), args.beta = b.data();
  AtenTensorHandle out;
  args.out = new_out(v.view, args.state, args.tokens, &out);
  gated_delta(args);
  return out;
}

// x [tokens, heads, width] with a [heads], or x [tokens, channels] with a [states, channels].
AtenTensorHandle scan_native(AtenTensorHandle x, AtenTensorHandle step, AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle c,
                             AtenTensorHandle cache, AtenTensorHandle segments, int64_t offset, bool by_head) {
  const Operand input(x, "x", by_head ? 3 : 2), steps(step, "step", 2), rate(a, "a", by_head ? 1 : 2), in(b, "b", 3), from(c, "c", 3);
  ScanArgs args{};
  args.tokens = input.size(0), args.groups = in.size(1), args.states = in.size(2);
  STD_TORCH_CHECK(args.groups > 0 && input.size(1) % args.groups == 0 && args.states <= MAX_STATES,
                  "expected whole groups, of at most ", MAX_STATES, " states");
  args.heads = by_head ? input.size(1) : args.groups;
  args.width = by_head ? input.size(2) : input.size(1) / args.groups;
  for (const Operand* each : {&in, &from}) each->sized("b and c", args.tokens * args.groups * args.states);
  steps.sized("step", args.tokens * input.size(1));
  rate.sized("a", by_head ? args.heads : args.states * input.size(1));
  std::optional<Tensor> kept;
  const int64_t floats = args.heads * args.width * args.states;
  args.state = rows_of(cache, dense_segments(segments, kept), offset, floats, args.tokens);
  args.x = input.data(), args.step = steps.data(), args.a = rate.data(), args.b = in.data(), args.c = from.data();
  AtenTensorHandle out;
  args.out = new_out(input.view, args.state, args.tokens, &out);
  by_head ? ssd_scan(args) : selective_scan(args);
  return out;
}

AtenTensorHandle linear_native(AtenTensorHandle decay, AtenTensorHandle x, AtenTensorHandle cache, AtenTensorHandle segments,
                               int64_t offset) {
  const Operand d(decay, "decay", 2), input(x, "x", 2);
  LinearScanArgs args{};
  args.tokens = input.size(0), args.channels = input.size(1);
  d.sized("decay", args.tokens * args.channels);
  std::optional<Tensor> kept;
  args.state = rows_of(cache, dense_segments(segments, kept), offset, args.channels, args.tokens);
  args.decay = d.data(), args.x = input.data();
  AtenTensorHandle out;
  args.out = new_out(input.view, args.state, args.tokens, &out);
  linear_scan(args);
  return out;
}

Tensor op_conv(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor cache, Tensor segments, int64_t offset, bool silu) {
  AtenTensorHandle given = bias ? bias->get() : nullptr;
  return Tensor(conv_native(x.get(), weight.get(), bias ? &given : nullptr, cache.get(), segments.get(), offset, silu));
}

Tensor op_delta(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor cache, Tensor segments, int64_t offset) {
  return Tensor(delta_native(query.get(), key.get(), value.get(), decay.get(), beta.get(), cache.get(), segments.get(), offset));
}

Tensor op_ssd(Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor cache, Tensor segments, int64_t offset) {
  return Tensor(scan_native(x.get(), step.get(), a.get(), b.get(), c.get(), cache.get(), segments.get(), offset, true));
}

Tensor op_selective(Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor cache, Tensor segments, int64_t offset) {
  return Tensor(scan_native(x.get(), step.get(), a.get(), b.get(), c.get(), cache.get(), segments.get(), offset, false));
}

Tensor op_linear(Tensor decay, Tensor x, Tensor cache, Tensor segments, int64_t offset) {
  return Tensor(linear_native(decay.get(), x.get(), cache.get(), segments.get(), offset));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infer, CPU, m) {
  m.impl("causal_conv_native", TORCH_BOX(&op_conv));
  m.impl("gated_delta_native", TORCH_BOX(&op_delta));
  m.impl("ssd_scan_native", TORCH_BOX(&op_ssd));
  m.impl("selective_scan_native", TORCH_BOX(&op_selective));
  m.impl("linear_scan_native", TORCH_BOX(&op_linear));
}

INFER_SHIM aoti_torch_cpu_causal_conv_native(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
                                             AtenTensorHandle cache, AtenTensorHandle segments, int64_t offset, int32_t silu,
                                             AtenTensorHandle* ret0) {
  return guarded("causal_conv_native", [&] { *ret0 = conv_native(x, weight, bias, cache, segments, offset, silu != 0); });
}

INFER_SHIM aoti_torch_cpu_gated_delta_native(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                             AtenTensorHandle decay, AtenTensorHandle beta, AtenTensorHandle cache,
                                             AtenTensorHandle segments, int64_t offset, AtenTensorHandle* ret0) {
  return guarded("gated_delta_native",
                 [&] { *ret0 = delta_native(query, key, value, decay, beta, cache, segments, offset); });
}

INFER_SHIM aoti_torch_cpu_ssd_scan_native(AtenTensorHandle x, AtenTensorHandle step, AtenTensorHandle a, AtenTensorHandle b,
                                          AtenTensorHandle c, AtenTensorHandle cache, AtenTensorHandle segments, int64_t offset,
                                          AtenTensorHandle* ret0) {
  return guarded("ssd_scan_native", [&] { *ret0 = scan_native(x, step, a, b, c, cache, segments, offset, true); });
}

INFER_SHIM aoti_torch_cpu_selective_scan_native(AtenTensorHandle x, AtenTensorHandle step, AtenTensorHandle a, AtenTensorHandle b,
                                                AtenTensorHandle c, AtenTensorHandle cache, AtenTensorHandle segments,
                                                int64_t offset, AtenTensorHandle* ret0) {
  return guarded("selective_scan_native", [&] { *ret0 = scan_native(x, step, a, b, c, cache, segments, offset, false); });
}

INFER_SHIM aoti_torch_cpu_linear_scan_native(AtenTensorHandle decay, AtenTensorHandle x, AtenTensorHandle cache,
                                             AtenTensorHandle segments, int64_t offset, AtenTensorHandle* ret0) {
  return guarded("linear_scan_native", [&] { *ret0 = linear_native(decay, x, cache, segments, offset); });
}
