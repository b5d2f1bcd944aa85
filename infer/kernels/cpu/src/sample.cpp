// A token for each row of logits: `infer/llm/engine/sampling/sampler_cpu.py` says what is computed, and is the slow twin.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "isa.h"

namespace infer_native {
namespace {

constexpr int64_t LANES = 16, SUM = 256;      // blocks, of every 16th number, in a STRETCH; weights that are added up first
constexpr int64_t CANDIDATES = 256;           // looked at first for a cut by mass
constexpr int64_t SERIAL_NUMBERS = 1 << 15;   // logits of all rows below which a second thread costs more than it saves
constexpr double NEARLY_NONE = 1e-30;         // masked tokens weigh about 1e-38 of the most likely one

struct Asked {  // as the caller lays it out: float64 [rows, 5]
  double temperature, top_k, top_p, min_p, place;
};

struct Row {
  const float* x;
  int64_t vocab;
  const RowKernels& kernels;
  std::vector<float> tops, part;
  std::vector<double> mass;
  std::vector<int64_t> ids;
  float top = 0;

  Row(int64_t width, const RowKernels& isa) : x(nullptr), vocab(width), kernels(isa), tops((width + STRETCH - 1) / STRETCH * LANES), part(SUM) {}

  // Returns whether no logit is NaN and the largest is finite.
  bool read(const float* logits) {
    x = logits;
    const bool numbers = kernels.block_tops(x, vocab, tops.data());
    top = *std::max_element(tops.begin(), tops.end());
    if (!numbers) top = std::numeric_limits<float>::quiet_NaN();
    return std::isfinite(top);
  }

  int64_t best() const {
    const int64_t start = (std::find(tops.begin(), tops.end(), top) - tops.begin()) / LANES * STRETCH;
    return std::find(x + start, x + vocab, top) - x;
  }

  // Ids of all that are not below `border`, most likely first, the lower id first among equals.
  void take(float border) {
    ids.clear();
    for (size_t b = 0; b < tops.size(); ++b) {
      if (tops[b] < border) continue;
      const int64_t block = static_cast<int64_t>(b), start = block / LANES * STRETCH, end = std::min(start + STRETCH, vocab);
      for (int64_t i = start + block % LANES; i < end; i += LANES)
        if (x[i] >= border) ids.push_back(i);
    }
    std::sort(ids.begin(), ids.end(), [this](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  }

  // At least the `count` most likely: the count-th largest top is not above the count-th largest number.
  void candidates(int64_t count) {
    if (count >= static_cast<int64_t>(tops.size())) return take(-std::numeric_limits<float>::infinity());
    std::vector<float> order(tops);
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<float>());
    take(order[count - 1]);
  }

  void weigh(double heat) {
    mass.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) mass[i] = std::exp((static_cast<double>(x[ids[i]]) - top) / heat);
  }

  // Returns how many of the most likely tokens reach a probability mass; their number plus one where they do not.
  int64_t nucleus(double goal) const {
    double reached = 0;
    for (size_t i = 0; i < mass.size(); ++i)
      if ((reached += mass[i]) >= goal) return static_cast<int64_t>(i) + 1;
    return static_cast<int64_t>(mass.size()) + 1;
  }

  int64_t from_all(const Asked& asked) {
    const float heat = static_cast<float>(asked.temperature);
    const int64_t blocks = (vocab + SUM - 1) / SUM;
    mass.resize(blocks);
    double total = 0;
    for (int64_t b = 0; b < blocks; ++b)
      mass[b] = total += kernels.weights(x + b * SUM, top, heat, std::min(SUM, vocab - b * SUM), nullptr);
    const double goal = std::max(asked.place, NEARLY_NONE) * total;
    const int64_t block = std::min<int64_t>(std::upper_bound(mass.begin(), mass.end(), goal) - mass.begin(), blocks - 1);
    const int64_t count = std::min(SUM, vocab - block * SUM);
    kernels.weights(x + block * SUM, top, heat, count, part.data());
    double reached = block ? mass[block - 1] : 0;
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double before = reached;
      if ((reached += part[i]) > goal) return block * SUM + i;
      if (reached > before) last = i;  // rounding may lead past the last that adds anything, which then is meant
    }
    return block * SUM + last;
  }

  int64_t from_cut(const Asked& asked) {
    const double heat = asked.temperature;
    const int64_t top_k = asked.top_k > 0 && asked.top_k < static_cast<double>(vocab) ? static_cast<int64_t>(asked.top_k) : 0;
    double goal = 0;
    if (top_k) {
      candidates(top_k);
      if (static_cast<int64_t>(ids.size()) > top_k) ids.resize(top_k);
    } else if (asked.top_p < 1) {
      candidates(CANDIDATES);
      for (int64_t start = 0; start < vocab; start += SUM)
        goal += kernels.weights(x + start, top, static_cast<float>(heat), std::min(SUM, vocab - start), nullptr);
    } else {
      take(static_cast<float>(top + heat * std::log(asked.min_p)) - 1e-3f);
    }
    weigh(heat);
    if (asked.top_p < 1) {
      if (top_k) goal = std::accumulate(mass.begin(), mass.end(), 0.0);
      int64_t count = nucleus(asked.top_p * goal);
      for (int64_t wanted = 8 * CANDIDATES; count > static_cast<int64_t>(mass.size()); wanted *= 8) {
        if (top_k || static_cast<int64_t>(ids.size()) == vocab) {
          count = static_cast<int64_t>(mass.size());
          break;
        }
        candidates(wanted);
        weigh(heat);
        count = nucleus(asked.top_p * goal);
      }
      mass.resize(count);
    }
    if (asked.min_p > 0) {
      int64_t count = 0;
      while (count < static_cast<int64_t>(mass.size()) && mass[count] >= asked.min_p) ++count;
      mass.resize(std::max<int64_t>(count, 1));
    }
    std::partial_sum(mass.begin(), mass.end(), mass.begin());
    const double place = asked.place * mass.back();
    const auto found = std::upper_bound(mass.begin(), mass.end(), place);
    if (found != mass.end()) return ids[found - mass.begin()];
    return ids[std::lower_bound(mass.begin(), mass.end(), mass.back()) - mass.begin()];
  }

  int64_t draw(const Asked& asked) {
    if (asked.temperature <= 0) return best();
    const bool cut = (asked.top_k > 0 && asked.top_k < static_cast<double>(vocab)) || asked.top_p < 1 || asked.min_p > 0;
    return cut ? from_cut(asked) : from_all(asked);
  }
};

}  // namespace
}  // namespace infer_native

// logits float32 [rows, vocab] → tokens int64 [rows], -1 where they are not numbers or none is allowed. `asked` float64
// [rows, 5]: temperature (0: the most likely), top_k (0: all), top_p, min_p, place in [0, 1).
extern "C" __attribute__((visibility("default"))) void infer_sample(const float* logits, int64_t rows, int64_t vocab,
                                                                    const double* asked, int64_t* tokens) {
  using namespace infer_native;
  const RowKernels& kernels = active_isa().rows;
  const auto* given = reinterpret_cast<const Asked*>(asked);
  const int64_t useful = std::min<int64_t>(rows, rows * vocab / SERIAL_NUMBERS);
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), useful)));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Row row(vocab, kernels);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; ++r) tokens[r] = row.read(logits + r * vocab) ? row.draw(given[r]) : -1;
  }
}
