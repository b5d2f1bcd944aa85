// Many queries: tiles of them against blocks of the cache, brought to float once per tile, with an online softmax.
#pragma once

#include "attend/attend_page.h"

namespace infer_native {
namespace {

constexpr int64_t BLOCK = 128;  // tokens
constexpr int TILE_VECTORS = Lane::TILE_VECTORS;
constexpr int64_t PANEL = TILE_VECTORS * LANES;  // tokens of keys, or columns of values, of one register tile
static_assert(PANEL % KEY_GROUP == 0 && BLOCK % PANEL == 0, "panels hold whole groups");

// out[r][0..PANEL) = a[..][r] · b[..][0..PANEL), over `count`; a is [count][HEIGHT].
template <int HEIGHT>
inline void tile_logits(const float* a, const float* b, int64_t count, float* out) {
  Floats acc[HEIGHT][TILE_VECTORS];
  unroll<HEIGHT>([&](auto r) { unroll<TILE_VECTORS>([&](auto v) { acc[r][v] = Floats{}; }); });
  for (int64_t i = 0; i < count; ++i, a += HEIGHT, b += PANEL) {
    Floats y[TILE_VECTORS];
    unroll<TILE_VECTORS>([&](auto v) { y[v] = load(b + v * LANES); });
    unroll<HEIGHT>([&](auto r) {
      const Floats x = broadcast(a[r]);
      unroll<TILE_VECTORS>([&](auto v) { acc[r][v] = Lane::fma(x, y[v], acc[r][v]); });
    });
  }
  unroll<HEIGHT>([&](auto r) { unroll<TILE_VECTORS>([&](auto v) { store(out + r * BLOCK + v * LANES, acc[r][v]); }); });
}

// sums[r][0..PANEL) = sums * keep[r] + weights[r] · b[..][0..PANEL), over `count`.
template <int HEIGHT>
inline void tile_sums(const float* weights, const float* b, int64_t count, const float* keep, float* sums,
                      int64_t sum_stride) {
  Floats acc[HEIGHT][TILE_VECTORS];
  unroll<HEIGHT>([&](auto r) {
    const Floats x = broadcast(keep[r]);
    unroll<TILE_VECTORS>([&](auto v) { acc[r][v] = load(sums + r * sum_stride + v * LANES) * x; });
  });
  for (int64_t i = 0; i < count; ++i, b += PANEL) {
    Floats y[TILE_VECTORS];
    unroll<TILE_VECTORS>([&](auto v) { y[v] = load(b + v * LANES); });
    unroll<HEIGHT>([&](auto r) {
      const Floats x = broadcast(weights[r * BLOCK + i]);
      unroll<TILE_VECTORS>([&](auto v) { acc[r][v] = Lane::fma(x, y[v], acc[r][v]); });
    });
  }
  unroll<HEIGHT>([&](auto r) {
    unroll<TILE_VECTORS>([&](auto v) { store(sums + r * sum_stride + v * LANES, acc[r][v]); });
  });
}

struct Tiler {
  const AttendArgs& args;
  const Span span;
  const int64_t sequence, head, group, first_token, rows, parts, dim, panels, width;
  // keys [BLOCK / PANEL][dim][PANEL], values [panels][BLOCK][PANEL], q by parts [dim][height], logits [rows][BLOCK],
  // sums [rows][width], total [rows][LANES]; most and keep [rows]
  float *keys, *values, *q, *logits, *sums, *most, *total, *keep;

  // `more` floats at `extra`, a multiple of 64 bytes, are the caller's.
  float* extra;

  Tiler(const AttendArgs& given, const Piece& piece, int64_t more = 0)
      : args(given), span(given, piece.sequence), sequence(piece.sequence), head(piece.head), group(group_size(given)),
        first_token(piece.begin), rows((piece.end - piece.begin) * group),
        parts((rows + Lane::TILE_ROWS - 1) / Lane::TILE_ROWS), dim(given.head_dim), panels((dim + PANEL - 1) / PANEL),
        width(panels * PANEL) {
    const int64_t floats = BLOCK * (dim + width) + (rows + 1) * width + rows * (BLOCK + width + LANES + 2);
    keys = static_cast<float*>(attend_workspace((floats + more + 16) * static_cast<int64_t>(sizeof(float)) + 64));
    extra = keys + (floats + 15) / 16 * 16;
    values = keys + BLOCK * dim;
    logits = values + BLOCK * width;
    sums = logits + rows * BLOCK;
    q = sums + rows * width;
    most = q + (rows + 1) * width;
    keep = most + rows;
    total = keep + rows;
    std::memset(values, 0, static_cast<size_t>(BLOCK * width) * sizeof(float));  // columns beyond the last stay 0
    std::memset(sums, 0, static_cast<size_t>(rows * width) * sizeof(float));
    std::memset(total, 0, static_cast<size_t>(rows * LANES) * sizeof(float));
    for (int64_t r = 0; r < rows; ++r) most[r] = NONE;
  }

  int64_t start(int64_t part) const { return rows * part / parts; }
  int64_t token_of(int64_t row) const { return first_token + row / group; }
  int64_t head_of(int64_t row) const { return head * group + row % group; }
  Seen seen(int64_t row) const { return Seen(args, span, token_of(row)); }

  void read_queries() {
    float* const row_of = q + rows * width;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = start(part), height = start(part + 1) - first;
      for (int64_t r = 0; r < height; ++r) {
        const int64_t token = span.first + token_of(first + r);
        read_row(args.query, args.type, token, head_of(first + r), dim, row_of);
        rotate(args, token, row_of);
        for (int64_t d = 0; d < dim; ++d) q[first * dim + d * height + r] = row_of[d] * args.scale;
      }
    }
  }

  float* key_at(int64_t offset) const { return keys + offset / PANEL * PANEL * dim + offset % PANEL; }

  template <Number T>
  void stage_group(const PageHead& page, int64_t place, int64_t offset) const {
    const uint8_t* from = page.keys + place * dim * SIZE<T>;
    float* to = key_at(offset);
    constexpr int64_t STEP = SIZE<T> * DEPTH<T>;
    for (int64_t d = 0; d < dim; d += DEPTH<T>, from += KEY_GROUP * STEP, to += DEPTH<T> * PANEL)
      unroll<GROUP_VECTORS>([&](auto v) {
        const auto x = Products<T>::load(from + v * LANES * STEP);
        if constexpr (T == Number::INT8) {
          const Floats steps = load(page.key_steps + (place + v * LANES) * 4);
          store(to + v * LANES, first_of(x) * steps);
          store(to + PANEL + v * LANES, second_of(x) * steps);
        } else {
          store(to + v * LANES, x);
        }
      });
  }

  void stage_key(const PageHead& page, int64_t place, int64_t offset) const {
    const float step = args.cache_type == Number::INT8 ? load_as<float>(page.key_steps + place * 4) : 1;
    const int64_t size = size_of(args.cache_type);
    const uint8_t* from = page.keys + place * dim * size;
    float* const to = key_at(offset);
    for (int64_t d = 0; d < dim; ++d) to[d * PANEL] = number_at(from + d * size, args.cache_type) * step;
  }

  template <Number T>
  void stage_value(const PageHead& page, int64_t place, int64_t offset) const {
    const Place at = Place::of_value(args, place);
    const uint8_t* const from = page.values + at.start * SIZE<T>;
    const float step = T == Number::INT8 ? load_as<float>(page.value_steps + place * 4) : 1;
    float* const to = values + offset * PANEL;
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
      float* const here = to + d / PANEL * BLOCK * PANEL + d % PANEL;
      if constexpr (T != Number::INT8) {
        store(here, load_numbers<T>(from + d * SIZE<T>));
      } else if (at.stride == 1) {
        store(here, load_numbers<T>(from + d) * broadcast(step));
      } else {
        const Ints pairs = Products<T>::load(from - place % DEPTH<T> + d * DEPTH<T>);
        store(here, (place % DEPTH<T> ? second_of(pairs) : first_of(pairs)) * broadcast(step));
      }
    }
    for (; d < dim; ++d)
      to[d / PANEL * BLOCK * PANEL + d % PANEL] = number_at(from + d * at.stride * SIZE<T>, T) * step;
  }

  // Places low..high of the cache, both in the block that begins at `origin`.
  template <Number T>
  void stage(int64_t origin, int64_t low, int64_t high) const {
    const int32_t* const table = args.block_table + sequence * args.blocks;
    int64_t block = low / args.page, place = low - block * args.page;
    for (int64_t at = low - origin; at < high - origin; ++block, place = 0) {
      const PageHead page(args, table[block], head);
      const int64_t left = args.page - place, most = high - origin - at, count = left < most ? left : most;
      if (grouped(args)) {
        const int64_t before = place % KEY_GROUP;
        for (int64_t t = -before; t < count; t += KEY_GROUP) stage_group<T>(page, place + t, at + t);
      } else {
        for (int64_t t = 0; t < count; ++t) stage_key(page, place + t, at + t);
      }
      for (int64_t t = 0; t < count; ++t) stage_value<T>(page, place + t, at + t);
      at += count;
    }
  }

  // Places [begin, end) of the block at `origin`, for the rows of one part.
  template <int HEIGHT>
  void attend_part(int64_t first, int64_t origin, int64_t begin, int64_t end) const {
    const int64_t last = first + HEIGHT - 1, high = seen(last).high, low = seen(first).low;
    if (origin + begin < low) begin = low - origin;
    if (origin + end > high) end = high - origin;
    if (begin >= end) return;
    const int64_t from = begin / PANEL * PANEL, to = (end + PANEL - 1) / PANEL * PANEL;
    float* const rows_logits = logits + first * BLOCK;
    for (int64_t t = from; t < to; t += PANEL) tile_logits<HEIGHT>(q + first * dim, keys + t * dim, dim, rows_logits + t);
    alignas(64) float before[(HEIGHT + LANES - 1) / LANES * LANES] = {}, shift[HEIGHT];
    for (int r = 0; r < HEIGHT; ++r) {
      const int64_t row = first + r;
      Seen visible = seen(row);
      if (visible.high > origin + end) visible.high = origin + end;  // what was not staged
      if (visible.low < origin + begin) visible.low = origin + begin;
      float* const at = rows_logits + r * BLOCK;
      const float here = finish_logits(args, head_of(row), at, from, to, visible, origin);
      before[r] = most[row];
      most[row] = here > most[row] ? here : most[row];
    }
    for (int r = 0; r < HEIGHT; ++r) {
      const float top = most[first + r];
      shift[r] = top == NONE ? 0 : top;
      before[r] = before[r] == NONE ? NONE : before[r] - top;
    }
    for (int r = 0; r < HEIGHT; r += LANES) store(before + r, exponential(load(before + r)));
    for (int r = 0; r < HEIGHT; ++r) {
      const int64_t row = first + r;
      keep[row] = before[r];
      float* const sum = total + row * LANES;
      store(sum, Lane::fma(load(sum), broadcast(keep[row]), exponentials(rows_logits + r * BLOCK, from, to, shift[r])));
    }
    for (int64_t p = 0; p < panels; ++p)
      tile_sums<HEIGHT>(rows_logits + begin, values + (p * BLOCK + begin) * PANEL, end - begin, keep + first,
                        sums + first * width + p * PANEL, width);
  }

  void run() const {
    const Seen bottom = seen(0), top = seen(rows - 1);
    const int64_t high = top.high < span.high ? top.high : span.high;
    for (int64_t origin = bottom.low / BLOCK * BLOCK; origin < high; origin += BLOCK) {
      const int64_t low = bottom.low > origin ? bottom.low : origin, end = high < origin + BLOCK ? high : origin + BLOCK;
      with_type(args.cache_type, [&](auto kind) { this->template stage<decltype(kind)::value>(origin, low, end); });
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = start(part);
        with_height<Lane::TILE_ROWS>(static_cast<int>(start(part + 1) - first), [&](auto height) {
          this->template attend_part<decltype(height)::value>(first, origin, low - origin, end - origin);
        });
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      write_result(args, span.first + token_of(r), head_of(r), most[r], reduce_add(load(total + r * LANES)), sums + r * width);
  }
};

inline void attend_tile(const AttendArgs& args, const Piece& piece) {
  Tiler tiler(args, piece);
  tiler.read_queries();
  tiler.run();
}

}  // namespace
}  // namespace infer_native
