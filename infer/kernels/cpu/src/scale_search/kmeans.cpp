// Codebooks of clustered weights: a histogram of the weights of 32 rows divided by the scale of their group, then exact
// one-dimensional k-means by dynamic programming. compress/formats/cluster.py and compress/kmeans.py are the references, with
// the same operations in the same order.
#include <cfloat>
#include <cmath>
#include <vector>

#include "linear/linear.h"

namespace infer_native {
namespace {

constexpr int64_t CLUSTER_ROWS = 32;

struct Histogram {
  std::vector<double> masses, moments;  // prefix sums, one more than bins

  explicit Histogram(int64_t bins) : masses(bins + 1), moments(bins + 1) {}

  int64_t bins() const { return static_cast<int64_t>(masses.size()) - 1; }

  void read(const float* weight, const float* importance, int64_t rows, int64_t columns) {
    masses.assign(masses.size(), 0);
    moments.assign(moments.size(), 0);
    float top = FLT_MIN;
    for (int64_t i = 0; i < rows * columns; ++i) top = std::fabs(weight[i]) > top ? std::fabs(weight[i]) : top;
    const float half = static_cast<float>(bins() / 2), last = static_cast<float>(bins() - 1);
    for (int64_t start = 0; start < rows * columns; start += GROUP) {
      const float* group = weight + start;
      float scale = group[0];
      for (int64_t i = 1; i < GROUP; ++i) scale = std::fabs(group[i]) > std::fabs(scale) ? group[i] : scale;
      const float divisor = scale != 0 ? scale : 1, share = scale / top;
      for (int64_t i = 0; i < GROUP; ++i) {
        const float unit = group[i] / divisor, mass = share * share * importance[start % columns + i];
        float bin = unit * half + half;
        bin = bin < 0 ? 0 : bin > last ? last : bin;
        masses[static_cast<int64_t>(bin) + 1] += mass;
        moments[static_cast<int64_t>(bin) + 1] += mass * unit;
      }
    }
    for (int64_t i = 0; i < bins(); ++i) masses[i + 1] += masses[i], moments[i + 1] += moments[i];
  }
};

double gain(double moment, double mass) { return moment * moment / (mass > DBL_MIN ? mass : DBL_MIN); }

struct Cuts {
  const Histogram& sums;
  std::vector<double> best, next;
  std::vector<std::vector<int64_t>> last;  // for each further cluster, where it begins in the best partition of a prefix

  explicit Cuts(const Histogram& h) : sums(h), best(h.masses.size()), next(best) {
    for (size_t i = 0; i < best.size(); ++i) best[i] = gain(h.moments[i], h.masses[i]);
  }

  void choose(int64_t end, int64_t low, int64_t high) {
    int64_t chosen = low;
    double top = -INFINITY;
    for (int64_t cut = low; cut <= high; ++cut) {
      const double value =
          best[cut] + gain(sums.moments[end] - sums.moments[cut], sums.masses[end] - sums.masses[cut]);
      if (value > top) top = value, chosen = cut;  // the leftmost of equal ones
    }
    next[end] = top;
    last.back()[end] = chosen;
  }

  void add_cluster() {
    const int64_t bins = sums.bins();
    last.emplace_back(bins + 1);
    std::vector<int64_t>& cuts = last.back();
    next[0] = 0;
    choose(bins, 0, bins);
    for (int64_t stride = bins / 2; stride; stride /= 2)
      for (int64_t end = stride; end < bins; end += 2 * stride) {
        const int64_t right = cuts[end + stride];
        choose(end, cuts[end - stride], right < end ? right : end);
      }
    best.swap(next);
  }
};

// Writes `centres` ascending, scaled to a largest magnitude of 1.
void optimal_centres(const Histogram& sums, int64_t clusters, float* out) {
  Cuts cuts(sums);
  for (int64_t i = 1; i < clusters; ++i) cuts.add_cluster();
  std::vector<int64_t> edges(clusters + 1, sums.bins());
  edges[0] = 0;
  for (int64_t i = clusters - 1; i > 0; --i) edges[i] = cuts.last[i - 1][edges[i + 1]];
  std::vector<double> centres(clusters, -INFINITY);
  double lowest = INFINITY, highest = -INFINITY;
  for (int64_t i = 0; i < clusters; ++i) {
    const double mass = sums.masses[edges[i + 1]] - sums.masses[edges[i]];
    const double moment = sums.moments[edges[i + 1]] - sums.moments[edges[i]];
    if (mass > 0) {
      const double centre = moment / mass;
      highest = centre > highest ? centre : highest;
      lowest = centre < lowest ? centre : lowest;
    }
    centres[i] = highest;
  }
  if (!std::isfinite(lowest)) lowest = 0;
  double top = 0;
  for (double& centre : centres) {
    centre = centre > lowest ? centre : lowest;
    top = std::fabs(centre) > top ? std::fabs(centre) : top;
  }
  for (int64_t i = 0; i < clusters; ++i) out[i] = static_cast<float>(centres[i] / (top > 0 ? top : 1));
}

}  // namespace
}  // namespace infer_native

// Fits a codebook [clusters] for each 32 rows of weight [rows, columns] with importance [columns]; bins is a power of two.
extern "C" INFER_API void infer_codebooks(const float* weight, const float* importance, int64_t rows, int64_t columns,
                                          int64_t clusters, int64_t bins, float* out) {
  using namespace infer_native;
  const int64_t tables = (rows + CLUSTER_ROWS - 1) / CLUSTER_ROWS;
#pragma omp parallel for schedule(static)
  for (int64_t table = 0; table < tables; ++table) {
    const int64_t first = table * CLUSTER_ROWS, count = rows - first < CLUSTER_ROWS ? rows - first : CLUSTER_ROWS;
    Histogram histogram(bins);
    histogram.read(weight + first * columns, importance, count, columns);
    optimal_centres(histogram, clusters, out + table * clusters);
  }
}
