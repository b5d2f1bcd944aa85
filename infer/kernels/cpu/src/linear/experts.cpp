// The layers of all experts that are asked for, as one team: rows are gathered by expert and quantized, then every thread
// multiplies its part of each expert's blocks, without a meeting between experts, and rows go back to their places.
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
constexpr int64_t LINE = 64, KEPT_BYTES = 8 << 20;                 // larger buffers are given back after the call

int64_t padded(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// An expert that is asked for: its rows are order[begin..begin + m), its buffers lie at these offsets.
struct Hit {
  int64_t expert, begin, m;
  int64_t rows, activations, results;
};

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};

// Where everything of one call lies. `order` holds the places of `expert` sorted by expert.
struct Plan {
  std::vector<int64_t> order;
  std::vector<Hit> hits;
  int64_t bytes = 0;

  Plan(const Asked& asked, const Staged& layer, int64_t columns, int64_t features) : order(asked.places()) {
    std::vector<int64_t> next(asked.experts + 1, 0);
    for (int64_t i = 0; i < asked.places(); ++i) ++next[asked.expert[i] + 1];
    for (int64_t e = 0; e < asked.experts; ++e) {
      const int64_t m = next[e + 1];
      next[e + 1] += next[e];
      if (m) hits.push_back({e, next[e], m, 0, 0, 0});
    }
    for (int64_t i = 0; i < asked.places(); ++i) order[next[asked.expert[i]]++] = i;
    const auto take = [&](int64_t wanted) {
      const int64_t at = bytes;
      bytes += padded(wanted);
      return at;
    };
    for (Hit& hit : hits) {
      const bool alone = hit.m == 1;  // is read and written where it is
      hit.rows = take(alone ? 0 : hit.m * columns * static_cast<int64_t>(sizeof(float)));
      hit.activations = take(layer.bytes(hit.m, columns));
      hit.results = take(alone ? 0 : hit.m * features * static_cast<int64_t>(sizeof(float)));
    }
  }
};

template <class Weight, class OfExpert>
void run(const Staged& layer, const float* x, const Asked& asked, const Weight& weight, OfExpert of_expert, float* y) {
  if (asked.places() == 0 || weight.rows == 0) return;
  const int64_t columns = weight.columns, features = weight.rows, blocks = packed_blocks(features);
  const Plan plan(asked, layer, columns, features);
  std::unique_ptr<void, Free> own;
  if (plan.bytes > KEPT_BYTES) {
    own.reset(std::aligned_alloc(LINE, static_cast<size_t>(plan.bytes)));
    if (!own) throw std::bad_alloc();
  }
  char* const memory = static_cast<char*>(own ? own.get() : scratch(plan.bytes + LINE));
  const int64_t count = static_cast<int64_t>(plan.hits.size());
  const std::unique_ptr<std::atomic<int64_t>[]> taken(new std::atomic<int64_t>[count + 1]);
  for (int64_t i = 0; i <= count; ++i) taken[i] = 0;

  const auto gather = [&](const Hit& hit) {
    const int64_t* order = plan.order.data() + hit.begin;
    const float* rows = x + order[0] / asked.top_k * columns;
    if (hit.m > 1) {
      float* to = reinterpret_cast<float*>(memory + hit.rows);
      for (int64_t r = 0; r < hit.m; ++r)
        std::memcpy(to + r * columns, x + order[r] / asked.top_k * columns, columns * sizeof(float));
      rows = to;
    }
    layer.quantize(rows, columns, hit.m, columns, {}, 0, 1, memory + hit.activations);
  };
  const auto multiply = [&](int64_t i, int64_t part, int64_t parts) {
    const Hit& hit = plan.hits[i];
    const Weight its = of_expert(hit.expert);
    float* to = hit.m > 1 ? reinterpret_cast<float*>(memory + hit.results) : y + plan.order[hit.begin] * features;
    layer.multiply(&its, memory + hit.activations, hit.m, nullptr, {to, features}, {part, parts, &taken[i]});
  };
  const auto scatter = [&](const Hit& hit, int64_t part, int64_t parts) {
    if (hit.m == 1) return;
    const float* from = reinterpret_cast<const float*>(memory + hit.results);
    for (int64_t r = hit.m * part / parts; r < hit.m * (part + 1) / parts; ++r)
      std::memcpy(y + plan.order[hit.begin + r] * features, from + r * features, features * sizeof(float));
  };

  const int64_t products = (asked.places() + WEIGHT_PRODUCTS * count) * columns * blocks * BLOCK_ROWS;
  int64_t threads = products / SERIAL_PRODUCTS;
  if (threads > omp_get_max_threads()) threads = omp_get_max_threads();
  if (threads <= 1) {
    for (const Hit& hit : plan.hits) gather(hit);
    for (int64_t i = 0; i < count; ++i) multiply(i, 0, 1);
    for (const Hit& hit : plan.hits) scatter(hit, 0, 1);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
    for (int64_t i = taken[count]++; i < count; i = taken[count]++) gather(plan.hits[i]);
#pragma omp barrier
    for (int64_t i = 0; i < count; ++i) multiply(i, part, parts);
    if (asked.places() > count) {
#pragma omp barrier
      for (const Hit& hit : plan.hits) scatter(hit, part, parts);
    }
  }
}

}  // namespace

void experts_lut4(const float* x, const Asked& asked, const Lut4Weight& weight, float* y) {
  const int64_t blocks = packed_blocks(weight.rows), groups = weight.columns / GROUP;
  const Isa& isa = active_isa();
  run(weight.scales == 1 ? isa.staged_lut4 : isa.staged_lut4_fine, x, asked, weight, [&](int64_t e) {
    Lut4Weight its = weight;
    its.codes += e * blocks * groups * BLOCK_ROWS * GROUP / 2;
    its.scale += e * blocks * groups * weight.scales * BLOCK_ROWS;
    its.table += e * blocks * BLOCK_ROWS, its.row_scale += e * blocks * BLOCK_ROWS;
    return its;
  }, y);
}

namespace {

Int8Weight int8_of(const Int8Weight& weight, int64_t e) {
  const int64_t blocks = packed_blocks(weight.rows), quads = (weight.columns + 3) / 4;
  Int8Weight its = weight;
  its.codes += e * blocks * quads * BLOCK_ROWS * 4, its.scale += e * blocks * BLOCK_ROWS;
  if (its.row_sum) its.row_sum += e * blocks * BLOCK_ROWS;
  return its;
}

}  // namespace

void experts_int8(const float* x, const Asked& asked, const Int8Weight& weight, float* y) {
  run(active_isa().staged_int8, x, asked, weight, [&](int64_t e) { return int8_of(weight, e); }, y);
}

void experts_int8_weight(const float* x, const Asked& asked, const Int8Weight& weight, float* y) {
  run(active_isa().staged_int8_weight, x, asked, weight, [&](int64_t e) { return int8_of(weight, e); }, y);
}

void experts_groupwise(const float* x, const Asked& asked, const GroupwiseWeight& weight, float* y) {
  const GroupwiseLayout layout(weight.layout, weight.columns);
  const int64_t blocks = packed_blocks(weight.rows), code_bytes = weight.columns / GROUP * layout.group_bytes();
  run(active_isa().staged_groupwise.of(layout.parts()), x, asked, weight, [&](int64_t e) {
    GroupwiseWeight its = weight;
    its.codes += e * blocks * code_bytes, its.scale += e * blocks * layout.record_bytes;
    its.table += e * blocks * BLOCK_ROWS;
    return its;
  }, y);
}

}  // namespace infer_native
