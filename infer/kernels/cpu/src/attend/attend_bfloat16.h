// Many queries of bfloat16: logits and weighted values are products of tiles of bfloat16 with float sums; masks, exponentials
// and the online softmax between them are those of attend_tile.h, in float.
#pragma once

#include "attend/lane_avx512.h"  // before what is written for its Lane
#include "attend/attend_tile.h"

namespace infer_native {
namespace {

constexpr int HIGH = 16, DEPTH_STEP = 32, WIDE = 64;  // rows; numbers of a row of A; columns of four tiles of sums
static_assert(BLOCK % WIDE == 0, "a block of the cache is whole passes");

// The bits of each float rounded to bfloat16, halves to even, in the upper half; NaN stays NaN.
inline __m512i rounded(Floats v) {
  const __m512 x = (__m512)v;
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), up, _mm512_set1_epi32(0x7fc00000));
}

inline void store_row(uint16_t* to, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(v), 16)));
}

// A row of B: of 16 columns, two numbers each.
inline void store_pairs(uint16_t* to, Floats first, Floats second) {
  const __m512i high = _mm512_and_si512(rounded(second), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(rounded(first), 16), high));
}

// Products::multiply(rows, columns, apart, steps, to, stride): to [16][stride] floats = rows [steps][16][32] times four columns
// of tiles [steps][16][16][2], `apart` bytes from one to the next; a Products object lives as long as a thread multiplies.
template <class Products>
struct BfloatTiler : Tiler {
  const int64_t depth, columns;  // head_dim in whole steps, and in whole passes
  // q [rows / 16][depth / 32][16][32], keys [BLOCK / 16][depth / 32][16][16][2], values [columns / 16][BLOCK / 32][16][16][2],
  // weights [BLOCK / 32][16][32], logits [16][BLOCK], products [16][columns]
  uint16_t *q16, *keys16, *values16, *weights16;
  float *logits16, *products;

  static int64_t up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
  static int64_t halves(const AttendArgs& args, int64_t rows) {
    const int64_t depth = up(args.head_dim, DEPTH_STEP), columns = up(args.head_dim, WIDE);
    return up(rows, HIGH) * depth + BLOCK * (depth + columns) + BLOCK * HIGH;
  }
  static int64_t floats(const AttendArgs& args) { return HIGH * (BLOCK + up(args.head_dim, WIDE)); }

  BfloatTiler(const AttendArgs& given, const Piece& piece)
      : Tiler(given, piece, halves(given, (piece.end - piece.begin) * group_size(given)) / 2 + floats(given)),
        depth(up(dim, DEPTH_STEP)), columns(up(dim, WIDE)) {
    logits16 = extra;
    products = logits16 + HIGH * BLOCK;
    q16 = reinterpret_cast<uint16_t*>(products + HIGH * columns);
    keys16 = q16 + up(rows, HIGH) * depth;
    values16 = keys16 + BLOCK * depth;
    weights16 = values16 + BLOCK * columns;
    std::memset(static_cast<void*>(q16), 0, static_cast<size_t>(halves(given, rows)) * 2);
  }

  void read_queries() const {
    float* const row_of = q;  // read as it is, then zeros up to whole steps
    std::memset(static_cast<void*>(row_of), 0, static_cast<size_t>(width) * sizeof(float));
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = span.first + token_of(row);
      read_row(args.query, args.type, token, head_of(row), dim, row_of);
      rotate(args, token, row_of);
      uint16_t* const to = q16 + row / HIGH * HIGH * depth + row % HIGH * DEPTH_STEP;
      for (int64_t d = 0; d < depth; d += LANES)
        store_row(to + d / DEPTH_STEP * HIGH * DEPTH_STEP + d % DEPTH_STEP, load(row_of + d) * broadcast(args.scale));
    }
  }

  // Converts the floats of `stage`, places begin to end of the block. Other places get weights of 0 and must be finite.
  void convert(int64_t begin, int64_t end) const {
    for (int64_t t = 0; t < BLOCK; t += 16) {
      if (t + 16 <= begin || t >= end) continue;
      const float* const from = key_at(t);
      uint16_t* const to = keys16 + t * depth;
      for (int64_t d = 0; d < dim; d += 2) {
        const Floats second = d + 1 < dim ? load(from + (d + 1) * PANEL) : Floats{};
        store_pairs(to + d / 2 * DEPTH_STEP, load(from + d * PANEL), second);
      }
    }
    const auto value_at = [&](int64_t t, int64_t d) {
      return t < begin || t >= end ? Floats{} : load(values + (d / PANEL * BLOCK + t) * PANEL + d % PANEL);
    };
    for (int64_t d = 0; d < width; d += 16)
      for (int64_t t = 0; t < BLOCK; t += 2)
        store_pairs(values16 + d * BLOCK + t / 2 * DEPTH_STEP, value_at(t, d), value_at(t + 1, d));
  }

  // Rows first..first + height, places [begin, end) of the block at `origin`.
  void attend_rows(int64_t first, int64_t height, int64_t origin, int64_t begin, int64_t end) const {
    const int64_t high = seen(first + height - 1).high, low = seen(first).low;
    if (origin + begin < low) begin = low - origin;
    if (origin + end > high) end = high - origin;
    if (begin >= end) return;
    const int64_t from = begin / WIDE * WIDE, to = up(end, WIDE), steps = (to - from) / DEPTH_STEP;
    for (int64_t t = from; t < to; t += WIDE)
      Products::multiply(q16 + first * depth, keys16 + t * depth, 16 * depth * 2, depth / DEPTH_STEP, logits16 + t, BLOCK);
    alignas(64) float before[HIGH] = {}, shift[HIGH] = {};
    for (int64_t r = 0; r < height; ++r) {
      Seen visible = seen(first + r);
      if (visible.high > origin + end) visible.high = origin + end;
      if (visible.low < origin + begin) visible.low = origin + begin;
      const float here = finish_logits(args, head_of(first + r), logits16 + r * BLOCK, from, to, visible, origin);
      const float old = most[first + r], top = most[first + r] = here > old ? here : old;
      shift[r] = top == NONE ? 0 : top;
      before[r] = old == NONE ? NONE : old - top;
    }
    store(before, exponential(load(before)));
    for (int64_t r = 0; r < height; ++r) {
      float *const row = logits16 + r * BLOCK, *const sum = total + (first + r) * LANES;
      store(sum, Lane::fma(load(sum), broadcast(before[r]), exponentials(row, from, to, shift[r])));
      for (int64_t t = from; t < to; t += LANES)
        store_row(weights16 + t / DEPTH_STEP * HIGH * DEPTH_STEP + r * DEPTH_STEP + t % DEPTH_STEP, load(row + t));
    }
    for (int64_t d = 0; d < columns; d += WIDE)
      Products::multiply(weights16 + from * HIGH, values16 + d * BLOCK + from * 16, 16 * BLOCK * 2, steps, products + d, columns);
    for (int64_t r = 0; r < height; ++r)
      for (int64_t d = 0; d < width; d += LANES) {
        float* const sum = sums + (first + r) * width + d;
        store(sum, Lane::fma(load(sum), broadcast(before[r]), load(products + r * columns + d)));
      }
  }

  void run() const {
    const Products of_this_thread;
    const Seen bottom = seen(0), top = seen(rows - 1);
    const int64_t high = top.high < span.high ? top.high : span.high;
    for (int64_t origin = bottom.low / BLOCK * BLOCK; origin < high; origin += BLOCK) {
      const int64_t low = bottom.low > origin ? bottom.low : origin, end = high < origin + BLOCK ? high : origin + BLOCK;
      with_type(args.cache_type, [&](auto kind) { this->template stage<decltype(kind)::value>(origin, low, end); });
      convert(low - origin, end - origin);
      for (int64_t first = 0; first < rows; first += HIGH)
        attend_rows(first, rows - first < HIGH ? rows - first : HIGH, origin, low - origin, end - origin);
    }
    for (int64_t r = 0; r < rows; ++r)
      write_result(args, span.first + token_of(r), head_of(r), most[r], reduce_add(load(total + r * LANES)), sums + r * width);
  }
};

template <class Products>
inline void attend_tile_bfloat16(const AttendArgs& args, const Piece& piece) {
  if (args.type != Number::BFLOAT16) return ATTEND_AVX512_VNNI.tile(args, piece);
  const BfloatTiler<Products> tiler(args, piece);
  tiler.read_queries();
  tiler.run();
}

}  // namespace
}  // namespace infer_native
