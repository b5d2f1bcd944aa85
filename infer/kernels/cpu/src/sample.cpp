// Sampling of one token for each row of logits; `infer/llm/engine/sampling/sampler_cpu.py` is the slow reference.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "isa.h"

namespace infer_native {
namespace {

constexpr int64_t LANES = 16;                 // maxima of each MAXIMA_BLOCK: lane i has those of every 16th number from i on
constexpr int64_t SUM_BLOCK = 256;            // weights with one partial sum
constexpr int64_t CANDIDATES = 256;           // tokens sorted first for top_p
constexpr int64_t SERIAL_NUMBERS = 1 << 15;   // logits of all rows below which a second thread costs more than it saves
constexpr double MIN_PLACE = 1e-30;           // above the weight of masked tokens, about 1e-38 of the most likely one

struct SamplingParams {  // a row of float64 [rows, 5]
  double temperature, top_k, top_p, min_p, place;
};

struct Row {
  const float* x;
  int64_t vocab;
  const RowKernels& kernels;
  std::vector<float> maxima, part;
  std::vector<double> mass;
  std::vector<int64_t> ids;
  float maximum = 0;

  Row(int64_t width, const RowKernels& isa) : x(nullptr), vocab(width), kernels(isa), maxima((width + MAXIMA_BLOCK - 1) / MAXIMA_BLOCK * LANES), part(SUM_BLOCK) {}

  // Returns whether no logit is NaN and the largest is finite.
  bool read(const float* logits) {
    x = logits;
    const bool no_nan = kernels.block_maxima(x, vocab, maxima.data());
    maximum = *std::max_element(maxima.begin(), maxima.end());
    if (!no_nan) maximum = std::numeric_limits<float>::quiet_NaN();
    return std::isfinite(maximum);
  }

  int64_t best() const {
    const int64_t start = (std::find(maxima.begin(), maxima.end(), maximum) - maxima.begin()) / LANES * MAXIMA_BLOCK;
    return std::find(x + start, x + vocab, maximum) - x;
  }

  // Collects the ids of logits >= `border`, in descending order, the lower id first among equals.
  void collect(float border) {
    ids.clear();
    for (size_t b = 0; b < maxima.size(); ++b) {
      if (maxima[b] < border) continue;
      const int64_t block = static_cast<int64_t>(b), start = block / LANES * MAXIMA_BLOCK, end = std::min(start + MAXIMA_BLOCK, vocab);
      for (int64_t i = start + block % LANES; i < end; i += LANES)
        if (x[i] >= border) ids.push_back(i);
    }
    std::sort(ids.begin(), ids.end(), [this](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  }

  // Collects at least the `count` most likely ids: the count-th largest maximum is <= the count-th largest logit.
  void collect_top(int64_t count) {
    if (count >= static_cast<int64_t>(maxima.size())) return collect(-std::numeric_limits<float>::infinity());
    std::vector<float> order(maxima);
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<float>());
    collect(order[count - 1]);
  }

  void compute_mass(double temperature) {
    mass.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) mass[i] = std::exp((static_cast<double>(x[ids[i]]) - maximum) / temperature);
  }

  // Returns how many of the collected tokens reach a probability mass; their number plus one where all together do not.
  int64_t nucleus(double goal) const {
    double reached = 0;
    for (size_t i = 0; i < mass.size(); ++i)
      if ((reached += mass[i]) >= goal) return static_cast<int64_t>(i) + 1;
    return static_cast<int64_t>(mass.size()) + 1;
  }

  int64_t sample_all(const SamplingParams& params) {
    const float temperature = static_cast<float>(params.temperature);
    const int64_t blocks = (vocab + SUM_BLOCK - 1) / SUM_BLOCK;
    mass.resize(blocks);
    double total = 0;
    for (int64_t b = 0; b < blocks; ++b)
      mass[b] = total += kernels.softmax_weights(x + b * SUM_BLOCK, maximum, temperature, std::min(SUM_BLOCK, vocab - b * SUM_BLOCK), nullptr);
    const double goal = std::max(params.place, MIN_PLACE) * total;
    const int64_t block = std::min<int64_t>(std::upper_bound(mass.begin(), mass.end(), goal) - mass.begin(), blocks - 1);
    const int64_t count = std::min(SUM_BLOCK, vocab - block * SUM_BLOCK);
    kernels.softmax_weights(x + block * SUM_BLOCK, maximum, temperature, count, part.data());
    double reached = block ? mass[block - 1] : 0;
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double before = reached;
      if ((reached += part[i]) > goal) return block * SUM_BLOCK + i;
      if (reached > before) last = i;  // rounding may leave `reached` below `goal`: then the last token with weight is drawn
    }
    return block * SUM_BLOCK + last;
  }

  int64_t sample_truncated(const SamplingParams& params) {
    const double temperature = params.temperature;
    const int64_t top_k = params.top_k > 0 && params.top_k < static_cast<double>(vocab) ? static_cast<int64_t>(params.top_k) : 0;
    double goal = 0;
    if (top_k) {
      collect_top(top_k);
      if (static_cast<int64_t>(ids.size()) > top_k) ids.resize(top_k);
    } else if (params.top_p < 1) {
      collect_top(CANDIDATES);
      for (int64_t start = 0; start < vocab; start += SUM_BLOCK)
        goal += kernels.softmax_weights(x + start, maximum, static_cast<float>(temperature), std::min(SUM_BLOCK, vocab - start), nullptr);
    } else {
      collect(static_cast<float>(maximum + temperature * std::log(params.min_p)) - 1e-3f);
    }
    compute_mass(temperature);
    if (params.top_p < 1) {
      if (top_k) goal = std::accumulate(mass.begin(), mass.end(), 0.0);
      int64_t count = nucleus(params.top_p * goal);
      for (int64_t wanted = 8 * CANDIDATES; count > static_cast<int64_t>(mass.size()); wanted *= 8) {
        if (top_k || static_cast<int64_t>(ids.size()) == vocab) {
          count = static_cast<int64_t>(mass.size());
          break;
        }
        collect_top(wanted);
        compute_mass(temperature);
        count = nucleus(params.top_p * goal);
      }
      mass.resize(count);
    }
    if (params.min_p > 0) {
      int64_t count = 0;
      while (count < static_cast<int64_t>(mass.size()) && mass[count] >= params.min_p) ++count;
      mass.resize(std::max<int64_t>(count, 1));
    }
    std::partial_sum(mass.begin(), mass.end(), mass.begin());
    const double place = params.place * mass.back();
    const auto found = std::upper_bound(mass.begin(), mass.end(), place);
    if (found != mass.end()) return ids[found - mass.begin()];
    return ids[std::lower_bound(mass.begin(), mass.end(), mass.back()) - mass.begin()];
  }

  int64_t draw(const SamplingParams& params) {
    if (params.temperature <= 0) return best();
    const bool cut = (params.top_k > 0 && params.top_k < static_cast<double>(vocab)) || params.top_p < 1 || params.min_p > 0;
    return cut ? sample_truncated(params) : sample_all(params);
  }
};

}  // namespace
}  // namespace infer_native

// Samples logits float32 [rows, vocab] → tokens int64 [rows], -1 where logits are NaN or all masked. `params` float64
// [rows, 5]: temperature (0: the most likely), top_k (0: all), top_p, min_p, place in [0, 1): the uniform draw.
extern "C" __attribute__((visibility("default"))) void infer_sample(const float* logits, int64_t rows, int64_t vocab,
                                                                    const double* params, int64_t* tokens) {
  using namespace infer_native;
  const RowKernels& kernels = active_isa().rows;
  const auto* given = reinterpret_cast<const SamplingParams*>(params);
  const int64_t useful = std::min<int64_t>(rows, rows * vocab / SERIAL_NUMBERS);
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), useful)));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Row row(vocab, kernels);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; ++r) tokens[r] = row.read(logits + r * vocab) ? row.draw(given[r]) : -1;
  }
}
