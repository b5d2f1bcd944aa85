// Queries begin..end of one head of a sequence against blocks of its keys and values, with an online softmax.
#pragma once

#include "attend/attend_encoder.h"
#include "attend/attend_tile.h"

namespace infer_native {
namespace {

typedef int8_t Bytes __attribute__((vector_size(LANES)));

struct AllTiler {
  const AttendAllArgs& args;
  const int64_t first, tokens, head, begin, rows, parts, dim, panels, width;
  const char* mask;  // of the sequence
  // keys [BLOCK / PANEL][dim][PANEL], values [panels][BLOCK][PANEL], q by parts [dim][height], logits [TILE_ROWS][BLOCK],
  // sums [rows][width], total [rows][LANES], most [rows]
  float *keys, *values, *q, *logits, *sums, *most, *total;

  AllTiler(const AttendAllArgs& given, int64_t batch, int64_t query_head, int64_t from, int64_t to)
      : args(given), first(given.first(batch)), tokens(given.length(batch)), head(query_head), begin(from), rows(to - from),
        parts((rows + Lane::TILE_ROWS - 1) / Lane::TILE_ROWS), dim(given.head_dim), panels((dim + PANEL - 1) / PANEL),
        width(panels * PANEL) {
    const int64_t floats = BLOCK * (dim + width + Lane::TILE_ROWS) + rows * (width + dim + LANES + 1);
    keys = static_cast<float*>(attend_workspace(floats * static_cast<int64_t>(sizeof(float)) + 64));
    values = keys + BLOCK * dim;
    logits = values + BLOCK * width;
    sums = logits + BLOCK * Lane::TILE_ROWS;
    total = sums + rows * width;
    q = total + rows * LANES;
    most = q + rows * dim;
    // Columns beyond the last stay 0.
    if (width != dim) std::memset(values, 0, static_cast<size_t>(BLOCK * width) * sizeof(float));
    std::memset(sums, 0, static_cast<size_t>(rows * (width + LANES)) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) most[r] = NONE;
    const int64_t size = args.mask.is_float ? 4 : 1;
    mask = static_cast<const char*>(args.mask.data);
    if (mask != nullptr) mask += batch * args.mask.batch_stride * size;
  }

  int64_t start(int64_t part) const { return rows * part / parts; }

  static const float* row_of(const Heads& heads, int64_t token, int64_t head) {
    return static_cast<const float*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
  }

  // Prefetches a later row of the head: rows are too far apart for the hardware prefetcher.
  void ask(const Heads& heads, int64_t token, int64_t of, int64_t last) const {
    constexpr int64_t AHEAD = 8, LINE = 64 / sizeof(float);
    if (token + AHEAD >= last) return;
    const float* const row = row_of(heads, token + AHEAD, of);
    for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(row + d);
  }

  void read_queries() const {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t at = start(part), height = start(part + 1) - at;
      for (int64_t r = 0; r < height; ++r) {
        const float* const from = row_of(args.query, first + begin + at + r, head);
        ask(args.query, first + begin + at + r, head, first + begin + rows);
        for (int64_t d = 0; d < dim; ++d) q[at * dim + d * height + r] = from[d] * args.scale;
      }
    }
  }

  void stage(int64_t origin, int64_t count) const {
    const int64_t kv_head = head / (args.query_heads / args.kv_heads);
    const int64_t padded = (count + PANEL - 1) / PANEL * PANEL;
    if (padded > count) std::memset(keys + (padded - PANEL) * dim, 0, static_cast<size_t>(PANEL * dim) * sizeof(float));
    // Row by row: down a column, rows that lie evenly apart share few sets of the first-level cache.
    for (int64_t t = 0; t < count; ++t) {
      const float* const from = row_of(args.key, first + origin + t, kv_head);
      ask(args.key, first + origin + t, kv_head, first + origin + count);
      float* const to = keys + t / PANEL * PANEL * dim + t % PANEL;
      for (int64_t d = 0; d < dim; ++d) to[d * PANEL] = from[d];
    }
    for (int64_t t = 0; t < count; ++t) {
      const float* const from = row_of(args.value, first + origin + t, kv_head);
      ask(args.value, first + origin + t, kv_head, first + origin + count);
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t left = dim - p * PANEL;
        float* const to = values + (p * BLOCK + t) * PANEL;
        if (left >= PANEL)
          unroll<TILE_VECTORS>([&](auto v) { store(to + v * LANES, load(from + p * PANEL + v * LANES)); });
        else
          std::memcpy(to, from + p * PANEL, static_cast<size_t>(left) * sizeof(float));
      }
    }
  }

  // Masks the `count` places from `origin` on that a query does not attend to; returns the largest logit.
  float finish(float* at, int64_t token, int64_t origin, int64_t count) const {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    if (mask != nullptr) {
      const int64_t from = token * args.mask.row_stride + origin, whole = count / LANES * LANES;
      if (args.mask.is_float) {
        const float* const added = reinterpret_cast<const float*>(mask) + from;
        for (int64_t t = 0; t < whole; t += LANES) store(at + t, load(at + t) + load(added + t));
        for (int64_t t = whole; t < count; ++t) at[t] += added[t];
      } else {
        const char* const sees = mask + from;
        for (int64_t t = 0; t < whole; t += LANES) {
          const Ints seen = __builtin_convertvector(load_as<Bytes>(sees + t), Ints);
          store(at + t, seen != 0 ? load(at + t) : broadcast(NONE));
        }
        for (int64_t t = whole; t < count; ++t) at[t] = sees[t] ? at[t] : NONE;
      }
    }
    if (args.causal && token + 1 - origin < count) count = token + 1 > origin ? token + 1 - origin : 0;
    for (int64_t t = count; t < padded; ++t) at[t] = NONE;
    Floats top = broadcast(NONE);
    for (int64_t t = 0; t < padded; t += LANES) top = Lane::max(top, load(at + t));
    return Lane::reduce_max(top);
  }

  template <int HEIGHT>
  void attend_part(int64_t at, int64_t origin, int64_t count) const {
    for (int64_t t = 0; t < count; t += PANEL) tile_logits<HEIGHT>(q + at * dim, keys + t * dim, dim, logits + t);
    alignas(64) float keep[(HEIGHT + LANES - 1) / LANES * LANES] = {}, shift[HEIGHT];
    for (int r = 0; r < HEIGHT; ++r) {
      const float before = most[at + r], here = finish(logits + r * BLOCK, begin + at + r, origin, count);
      const float top = most[at + r] = here > before ? here : before;
      shift[r] = top == NONE ? 0 : top;
      keep[r] = before == NONE ? NONE : before - top;
    }
    for (int r = 0; r < HEIGHT; r += LANES) store(keep + r, exponential(load(keep + r)));
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int r = 0; r < HEIGHT; ++r) {
      float* const sum = total + (at + r) * LANES;
      store(sum, Lane::fma(load(sum), broadcast(keep[r]), exponentials(logits + r * BLOCK, 0, padded, shift[r])));
    }
    for (int64_t p = 0; p < panels; ++p)
      tile_sums<HEIGHT>(logits, values + p * BLOCK * PANEL, count, keep, sums + at * width + p * PANEL, width);
  }

  void run() const {
    read_queries();
    const int64_t end = args.causal ? begin + rows : tokens;
    for (int64_t origin = 0; origin < end; origin += BLOCK) {
      const int64_t count = end - origin < BLOCK ? end - origin : BLOCK;
      stage(origin, count);
      for (int64_t part = 0; part < parts; ++part)
        with_height<Lane::TILE_ROWS>(static_cast<int>(start(part + 1) - start(part)), [&](auto height) {
          this->template attend_part<decltype(height)::value>(start(part), origin, count);
        });
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float sum = reduce_add(load(total + r * LANES));
      const Floats factor = broadcast(sum == 0 ? 0 : 1 / sum);  // a NaN stays
      float* const from = sums + r * width;
      for (int64_t d = 0; d < dim; d += LANES) store(from + d, load(from + d) * factor);
      write_row(args.out, Number::FLOAT32, first + begin + r, head, dim, from);
    }
  }
};

inline void attend_all_tile(const AttendAllArgs& args, int64_t batch, int64_t head, int64_t begin, int64_t end) {
  AllTiler(args, batch, head, begin, end).run();
}

}  // namespace
}  // namespace infer_native
