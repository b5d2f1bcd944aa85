// Linear layers of all routed experts in one parallel region: rows are gathered by expert and quantized, then every thread
// multiplies its part of each expert's blocks, without a barrier between experts, and results are scattered.
#include "linear/experts.h"

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"

namespace infer_native {
namespace {

constexpr int64_t SERIAL_PRODUCTS = 1 << 18, WEIGHT_PRODUCTS = 3;  // as in parallel_linear.h
constexpr int64_t CACHE_LINE = 64, MAX_SCRATCH = 8 << 20;          // larger buffers are freed after the call

int64_t padded(int64_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

// The rows of one expert: order[begin..begin + m), and the offsets of its buffers in the workspace.
struct ExpertBatch {
  int64_t expert, begin, m;
  int64_t rows, activations, results;
};

struct FreeDeleter {
  void operator()(void* pointer) const { std::free(pointer); }
};

// Row order and buffer offsets of one call; `order` is the stable argsort of `expert`.
struct Workspace {
  std::vector<int64_t> order;
  std::vector<ExpertBatch> batches;
  int64_t bytes = 0;

  Workspace(const ExpertRouting& routing, const Staged& layer, int64_t columns, int64_t features) : order(routing.assignments()) {
    std::vector<int64_t> next(routing.experts + 1, 0);
    for (int64_t i = 0; i < routing.assignments(); ++i) ++next[routing.expert[i] + 1];
    for (int64_t e = 0; e < routing.experts; ++e) {
      const int64_t m = next[e + 1];
      next[e + 1] += next[e];
      if (m) batches.push_back({e, next[e], m, 0, 0, 0});
    }
    for (int64_t i = 0; i < routing.assignments(); ++i) order[next[routing.expert[i]]++] = i;
    const auto reserve = [&](int64_t wanted) {
      const int64_t at = bytes;
      bytes += padded(wanted);
      return at;
    };
    for (ExpertBatch& batch : batches) {
      const bool single = batch.m == 1;  // read and written in place
      batch.rows = reserve(single ? 0 : batch.m * columns * static_cast<int64_t>(sizeof(float)));
      batch.activations = reserve(layer.bytes(batch.m, columns));
      batch.results = reserve(single ? 0 : batch.m * features * static_cast<int64_t>(sizeof(float)));
    }
  }
};

template <class Weight, class OfExpert>
void run(const Staged& layer, const float* x, const ExpertRouting& routing, const Weight& weight, OfExpert of_expert, float* y,
         InputGrid grid = {}) {
  if (routing.assignments() == 0 || weight.rows == 0) return;
  const int64_t columns = weight.columns, features = weight.rows, blocks = packed_blocks(features);
  const Workspace workspace(routing, layer, columns, features);
  std::unique_ptr<void, FreeDeleter> allocated;
  if (workspace.bytes > MAX_SCRATCH) {
    allocated.reset(std::aligned_alloc(CACHE_LINE, static_cast<size_t>(workspace.bytes)));
    if (!allocated) throw std::bad_alloc();
  }
  char* const memory = static_cast<char*>(allocated ? allocated.get() : scratch(workspace.bytes + CACHE_LINE));
  const int64_t count = static_cast<int64_t>(workspace.batches.size());
  const std::unique_ptr<std::atomic<int64_t>[]> next(new std::atomic<int64_t>[count + 1]);
  for (int64_t i = 0; i <= count; ++i) next[i] = 0;

  const auto gather = [&](const ExpertBatch& batch) {
    const int64_t* order = workspace.order.data() + batch.begin;
    const float* rows = x + order[0] / routing.top_k * columns;
    if (batch.m > 1) {
      float* to = reinterpret_cast<float*>(memory + batch.rows);
      for (int64_t r = 0; r < batch.m; ++r)
        std::memcpy(to + r * columns, x + order[r] / routing.top_k * columns, columns * sizeof(float));
      rows = to;
    }
    layer.quantize(rows, columns, batch.m, columns, grid, 0, 1, memory + batch.activations);
  };
  const auto multiply = [&](int64_t i, int64_t part, int64_t parts) {
    const ExpertBatch& batch = workspace.batches[i];
    const Weight of_one = of_expert(batch.expert);
    float* to = batch.m > 1 ? reinterpret_cast<float*>(memory + batch.results) : y + workspace.order[batch.begin] * features;
    layer.multiply(&of_one, memory + batch.activations, batch.m, nullptr, {to, features}, {part, parts, &next[i]});
  };
  const auto scatter = [&](const ExpertBatch& batch, int64_t part, int64_t parts) {
    if (batch.m == 1) return;
    const float* from = reinterpret_cast<const float*>(memory + batch.results);
    for (int64_t r = batch.m * part / parts; r < batch.m * (part + 1) / parts; ++r)
      std::memcpy(y + workspace.order[batch.begin + r] * features, from + r * features, features * sizeof(float));
  };

  const int64_t products = (routing.assignments() + WEIGHT_PRODUCTS * count) * columns * blocks * BLOCK_ROWS;
  int64_t threads = products / SERIAL_PRODUCTS;
  if (threads > omp_get_max_threads()) threads = omp_get_max_threads();
  if (threads <= 1) {
    for (const ExpertBatch& batch : workspace.batches) gather(batch);
    for (int64_t i = 0; i < count; ++i) multiply(i, 0, 1);
    for (const ExpertBatch& batch : workspace.batches) scatter(batch, 0, 1);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
    for (int64_t i = next[count]++; i < count; i = next[count]++) gather(workspace.batches[i]);
#pragma omp barrier
    for (int64_t i = 0; i < count; ++i) multiply(i, part, parts);
    if (routing.assignments() > count) {
#pragma omp barrier
      for (const ExpertBatch& batch : workspace.batches) scatter(batch, part, parts);
    }
  }
}

}  // namespace

void experts_lut4(const float* x, const ExpertRouting& routing, const Lut4Weight& weight, float* y) {
  const int64_t blocks = packed_blocks(weight.rows), groups = weight.columns / GROUP;
  const Isa& isa = active_isa();
  run(weight.scales == 1 ? isa.staged_lut4 : isa.staged_lut4_fine, x, routing, weight, [&](int64_t e) {
    Lut4Weight of_one = weight;
    of_one.codes += e * blocks * groups * BLOCK_ROWS * GROUP / 2;
    of_one.scale += e * blocks * groups * weight.scales * BLOCK_ROWS;
    of_one.table += e * blocks * BLOCK_ROWS, of_one.row_scale += e * blocks * BLOCK_ROWS;
    return of_one;
  }, y);
}

namespace {

Int8Weight int8_of(const Int8Weight& weight, int64_t e) {
  const int64_t blocks = packed_blocks(weight.rows), quads = (weight.columns + 3) / 4;
  Int8Weight of_one = weight;
  of_one.codes += e * blocks * quads * BLOCK_ROWS * 4, of_one.scale += e * blocks * BLOCK_ROWS;
  if (of_one.row_sum) of_one.row_sum += e * blocks * BLOCK_ROWS;
  return of_one;
}

}  // namespace

void experts_int8(const float* x, const ExpertRouting& routing, const Int8Weight& weight, float* y) {
  run(active_isa().staged_int8, x, routing, weight, [&](int64_t e) { return int8_of(weight, e); }, y);
}

void experts_int8_weight(const float* x, const ExpertRouting& routing, const Int8Weight& weight, float* y) {
  run(active_isa().staged_int8_weight, x, routing, weight, [&](int64_t e) { return int8_of(weight, e); }, y);
}

void experts_groupwise(const float* x, const ExpertRouting& routing, const GroupwiseWeight& weight, float* y) {
  const GroupwiseLayout layout(weight.layout, weight.columns);
  const int64_t blocks = packed_blocks(weight.rows), code_bytes = weight.columns / GROUP * layout.group_bytes();
  run(active_isa().staged_groupwise.of(layout.parts()), x, routing, weight, [&](int64_t e) {
    GroupwiseWeight of_one = weight;
    of_one.codes += e * blocks * code_bytes, of_one.scale += e * blocks * layout.record_bytes;
    of_one.table += e * blocks * BLOCK_ROWS;
    return of_one;
  }, y, {nullptr, nullptr, layout.integer_zero()});
}

}  // namespace infer_native
