// Distribution of a layer among the threads of one OpenMP region: quantize the rows, then multiply.
#pragma once

#include <omp.h>

#include <type_traits>
#include <utility>

#include "linear/quantize_activations.h"

namespace infer_native {
namespace {

// Products per thread below which waking it costs more than it saves; reading a weight from memory counts as WEIGHT_PRODUCTS.
constexpr int64_t SERIAL_PRODUCTS = 1 << 18, WEIGHT_PRODUCTS = 3;
constexpr int64_t SERIAL_QUANTIZE = 1 << 14;  // elements

constexpr int FEW_ROWS = 2;  // of activations: reading the weight is most of the work

// Returns the prefetch distance, in bytes, of weights that are read from memory for HEIGHT rows.
template <int HEIGHT>
inline int64_t stream_distance() {
  return HEIGHT <= FEW_ROWS && hardware_follows_streams ? 0 : Vector::PREFETCH;
}

// Returns whether threads divide the tiles of rows rather than the blocks of outputs.
inline bool share_tiles(const Tiles& tiles, int64_t blocks, int64_t threads) {
  return blocks < 2 * threads * Vector::TILE_BLOCKS && tiles.count > blocks;
}

// With few rows the layer is bound by memory, and each thread reads one contiguous range; with more, threads claim strips.
constexpr int64_t STRIP_BLOCKS = 4, STRIP_ROWS = 16;
static_assert(STRIP_BLOCKS % Vector::TILE_BLOCKS == 0, "strips hold whole register tiles");

template <class Multiply>
inline void multiply_part(const Tiles& tiles, int64_t blocks, Share mine, Multiply multiply) {
  if (share_tiles(tiles, blocks, mine.parts)) {
    multiply(share(tiles.count, mine.part, mine.parts), Range{0, blocks});
  } else if (tiles.rows < STRIP_ROWS || mine.parts == 1) {
    multiply(Range{0, tiles.count}, share(blocks, mine.part, mine.parts));
  } else {
    const auto claim = [&] { return mine.next->fetch_add(STRIP_BLOCKS, std::memory_order_relaxed); };
    for (int64_t first = claim(); first < blocks; first = claim())
      multiply(Range{0, tiles.count}, Range{first, first + STRIP_BLOCKS < blocks ? first + STRIP_BLOCKS : blocks});
  }
}

// Calls function(first row of a tile, its height, range of its rows, range of their pieces of columns) for every tile in which
// this thread quantizes. Rows of a tile share cache lines: to avoid false sharing, threads divide few tiles by columns.
template <class Function>
inline void each_slice(const Tiles& tiles, int64_t pieces, int64_t part, int64_t parts, Function function) {
  if (by_rows(tiles.rows, parts)) {
    const Range mine = share(tiles.rows, part, parts);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t start = tiles.start(tile), height = tiles.height(tile);
      const Range rows{mine.begin > start ? mine.begin - start : 0, mine.end < start + height ? mine.end - start : height};
      if (rows.begin < rows.end) function(start, height, rows, Range{0, pieces});
    }
    return;
  }
  const Range mine = share(tiles.count * pieces, part, parts);
  for (int64_t at = mine.begin; at < mine.end;) {
    const int64_t tile = at / pieces, left = mine.end - tile * pieces, height = tiles.height(tile);
    function(tiles.start(tile), height, Range{0, height}, Range{at % pieces, left < pieces ? left : pieces});
    at = (tile + 1) * pieces;
  }
}

// Calls quantize(part, parts) and multiply(tiles, blocks) on disjoint ranges that cover all work.
template <class Quantize, class Multiply>
inline void parallel(const Tiles& tiles, int64_t columns, int64_t blocks, Quantize quantize, Multiply multiply) {
  const int64_t products = (tiles.rows + WEIGHT_PRODUCTS) * columns * blocks * BLOCK_ROWS;
  const bool by_rows = share_tiles(tiles, blocks, omp_get_max_threads());
  std::atomic<int64_t> next{0};
  int64_t threads = by_rows ? tiles.count : blocks;
  if (threads > omp_get_max_threads()) threads = omp_get_max_threads();
  if (threads > products / SERIAL_PRODUCTS) threads = products / SERIAL_PRODUCTS;
  if (threads <= 1) {
    quantize(0, 1);
    multiply(Range{0, tiles.count}, Range{0, blocks});
    return;
  }
  const bool quantize_first = tiles.rows * columns < SERIAL_QUANTIZE;
  if (quantize_first) quantize(0, 1);
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
    if (!quantize_first) {
      quantize(part, parts);
#pragma omp barrier
    }
    multiply_part(tiles, blocks, {part, parts, &next}, multiply);
  }
}

// Calls function(0), …, function(N - 1) with compile-time constants: arrays indexed by them stay in registers.
template <class Function, int... I>
inline __attribute__((always_inline)) void unroll(Function function, std::integer_sequence<int, I...>) {
  (function(std::integral_constant<int, I>()), ...);
}

template <int N, class Function>
inline __attribute__((always_inline)) void unroll(Function function) {
  unroll(function, std::make_integer_sequence<int, N>());
}

// Calls function(std::integral_constant<int, height>) for a height of 1..MAX.
template <int MAX, class Function>
inline void with_height(int height, Function function) {
  if constexpr (MAX > 1) {
    if (height < MAX) return with_height<MAX - 1>(height, function);
  }
  function(std::integral_constant<int, MAX>());
}

inline void write_row(float* y, int64_t count, Vector::Floats value) {
  if (count >= BLOCK_ROWS) return Vector::store(y, value);
  alignas(64) float part[BLOCK_ROWS];
  Vector::store(part, value);
  std::memcpy(y, part, count * sizeof(float));
}

inline Vector::Floats read_row(const float* bias, int64_t count) {
  return count >= BLOCK_ROWS ? Vector::load(bias) : load_tail(bias, count);
}

}  // namespace
}  // namespace infer_native
