// y = x @ weight.T where both are int8, on tile registers, with the bits of linear_int8.h: the same codes, exact sums, and the same
// steps from a sum to a result.
//
// 16 quads of a packed block are one tile of weights. Activations lie in tiles too: of `height` rows, for each 64 columns,
// row by row. Four tiles of sums hide the latency of a product: two tiles of rows by two blocks, or one by four.
#pragma once

#include "amx/tiles.h"
#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

constexpr int64_t AMX_QUADS = 16;       // of a tile of weights
constexpr int64_t AMX_CHUNK_STEPS = 16;  // 32 KiB of weights that stay in the first-level cache while tiles of rows pass
constexpr int64_t AMX_CHUNK_TILES = 16;  // tiles of rows whose sums wait between two chunks
constexpr int64_t AMX_AHEAD = 8192;      // bytes ahead that memory is asked where weights are read once
constexpr int AMX_BLOCKS = 4;            // of a strip
static_assert(AMX_BLOCKS == Vector::TILE_BLOCKS, "threads share strips of whole register tiles");

// Fewer than 8 rows wait for weights, and the vector kernels stream those.
inline bool amx_pays(int64_t m, int64_t columns) { return m >= 8 && columns > 0; }

enum : int { SUMS = 0, ROWS_A = 4, WEIGHTS_B = 6 };

// Rows in tiles of one height, the last one partly empty, so that one configuration serves all.
struct AmxRows {
  int64_t rows, count, height;

  explicit AmxRows(int64_t m)
      : rows(m), count((m + TILE_MAX_ROWS - 1) / TILE_MAX_ROWS), height(count ? (m + count - 1) / count : 0) {}
  int64_t start(int64_t tile) const { return tile * height; }
  int64_t size(int64_t tile) const { return rows - start(tile) < height ? rows - start(tile) : height; }
  int64_t padded() const { return (count * height + 15) / 16 * 16; }
  TileConfig config() const {
    TileConfig shapes;
    for (int i = 0; i < 4; ++i) shapes.shape(SUMS + i, height, TILE_ROW_BYTES);
    for (int i = 0; i < 2; ++i) shapes.shape(ROWS_A + i, height, TILE_ROW_BYTES);
    for (int i = 0; i < 2; ++i) shapes.shape(WEIGHTS_B + i, TILE_MAX_ROWS, TILE_ROW_BYTES);
    return shapes;
  }
};

struct AmxInt8Activations {
  RowGrid* grid;
  int32_t* offset;
  int8_t* q;

  AmxInt8Activations(const void* memory, const AmxRows& tiles) {
    char* place = static_cast<char*>(const_cast<void*>(memory));
    grid = reinterpret_cast<RowGrid*>(place);
    offset = reinterpret_cast<int32_t*>(place + tiles.padded() * 8);
    q = reinterpret_cast<int8_t*>(place + tiles.padded() * 12);
  }
};

inline int64_t amx_steps(int64_t columns) { return (columns + 63) / 64; }

struct AmxInt8Job {
  const Int8Weight& weight;
  const AmxRows& tiles;
  const AmxInt8Activations& x;
  const float* bias;
  Rows y;
  int64_t quads, whole, steps;  // whole: steps whose quads are all there

  AmxInt8Job(const Int8Weight& w, const AmxRows& t, const AmxInt8Activations& a, const float* b, Rows to)
      : weight(w), tiles(t), x(a), bias(b), y(to), quads((w.columns + 3) / 4), whole(quads / AMX_QUADS),
        steps(amx_steps(w.columns)) {}
  int64_t tile_bytes() const { return tiles.height * TILE_ROW_BYTES; }
};

// Of HEIGHTS tiles of rows and BLOCKS blocks: sums += rows * weights over `steps` steps.
template <int HEIGHTS, int BLOCKS, bool ONCE>
inline __attribute__((always_inline)) void amx_products(const int8_t* weights, int64_t stride, const int8_t* q,
                                                        int64_t tile_bytes, int64_t tile_stride, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step, weights += TILE_BYTES, q += tile_bytes) {
    unroll<HEIGHTS>([&](auto t) { AmxTiles::load<ROWS_A + t>(q + t * tile_stride, TILE_ROW_BYTES); });
    unroll<BLOCKS>([&](auto b) {
      constexpr int TILE = WEIGHTS_B + b % 2;
      const int8_t* const from = weights + b * stride;
      if (ONCE)
        for (int line = 0; line < TILE_BYTES; line += 64) __builtin_prefetch(from + AMX_AHEAD + line);
      AmxTiles::load<TILE>(from, TILE_ROW_BYTES);
      unroll<HEIGHTS>([&](auto t) { AmxTiles::dot_signed_unsigned<SUMS + t * BLOCKS + b, ROWS_A + t, TILE>(); });
    });
  }
}

// Steps [begin, end) of tiles `tile` on and of blocks `block` on; the sums of a tile are [16][AMX_BLOCKS * 16], the first
// block's in column `place`. `tail`: the weights of the last step of each block of the strip where it is not whole.
template <int HEIGHTS, int BLOCKS, bool ONCE>
__attribute__((noinline)) void amx_sums(const AmxInt8Job& job, int64_t tile, int64_t block, Range steps, const int8_t* tail,
                                        int32_t* sums) {
  constexpr int64_t STRIDE = AMX_BLOCKS * TILE_ROW_BYTES, NEXT = TILE_MAX_ROWS * AMX_BLOCKS * 16;
  unroll<HEIGHTS>([&](auto t) {
    unroll<BLOCKS>([&](auto b) {
      constexpr int SUM = SUMS + t * BLOCKS + b;
      if (steps.begin == 0) AmxTiles::zero<SUM>();
      else AmxTiles::load<SUM>(sums + t * NEXT + b * 16, STRIDE);
    });
  });
  const int64_t tile_bytes = job.tile_bytes(), tile_stride = job.steps * tile_bytes, block_stride = job.quads * 64;
  const int64_t whole = steps.end < job.whole ? steps.end : job.whole;
  const int8_t* const q = job.x.q + tile * tile_stride;
  amx_products<HEIGHTS, BLOCKS, ONCE>(job.weight.codes + block * block_stride + steps.begin * TILE_BYTES, block_stride,
                                      q + steps.begin * tile_bytes, tile_bytes, tile_stride, whole - steps.begin);
  if (whole < steps.end)
    amx_products<HEIGHTS, BLOCKS, false>(tail, TILE_BYTES, q + whole * tile_bytes, tile_bytes, tile_stride, 1);
  unroll<HEIGHTS>([&](auto t) {
    unroll<BLOCKS>([&](auto b) { AmxTiles::store<SUMS + t * BLOCKS + b>(sums + t * NEXT + b * 16, STRIDE); });
  });
}

// The results of one tile of rows and `count` blocks.
inline void amx_finish(const AmxInt8Job& job, int64_t tile, int64_t block, int64_t count, const int32_t* sums) {
  const int64_t start = job.tiles.start(tile), size = job.tiles.size(tile);
  const RowGrid* const grid = job.x.grid + start;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t n = (block + b) * BLOCK_ROWS, columns = job.weight.rows - n;
    const Vector::Floats scale = Vector::load(job.weight.scale + n);
    const Vector::Floats added = job.bias == nullptr ? Vector::broadcast(0.0f) : read_row(job.bias + n, columns);
    for (int64_t row = 0; row < size; ++row) {
      Vector::Sums exact = Vector::load_sums(sums + (row * AMX_BLOCKS + b) * 16);
      exact = Vector::add(exact, Vector::broadcast(job.x.offset[start + row]));
      if (grid[row].zero != 0)
        exact = Vector::sub_product(exact, Vector::broadcast(grid[row].zero), Vector::load_sums(job.weight.row_sum + n));
      Vector::Floats value = Vector::mul(Vector::mul(Vector::to_float(exact), Vector::broadcast(grid[row].step)), scale);
      if (job.bias != nullptr) value = Vector::add(value, added);
      write_row(job.y.row(start + row) + n, columns, value);
    }
  }
}

template <int HEIGHTS, int BLOCKS>
inline void amx_some(const AmxInt8Job& job, int64_t tile, int64_t block, Range steps, bool once, const int8_t* tail,
                     int32_t* sums) {
  if (once) amx_sums<HEIGHTS, BLOCKS, true>(job, tile, block, steps, tail, sums);
  else amx_sums<HEIGHTS, BLOCKS, false>(job, tile, block, steps, tail, sums);
  if (steps.end < job.steps) return;
  for (int t = 0; t < HEIGHTS; ++t) amx_finish(job, tile + t, block, BLOCKS, sums + t * TILE_MAX_ROWS * AMX_BLOCKS * 16);
}

// Up to AMX_BLOCKS blocks for the tiles of rows in `chunk`.
inline void amx_strip(const AmxInt8Job& job, Range chunk, int64_t block, int64_t count) {
  alignas(64) int32_t sums[AMX_CHUNK_TILES][TILE_MAX_ROWS][AMX_BLOCKS * 16];
  alignas(64) int8_t tail[AMX_BLOCKS][TILE_BYTES];
  if (job.whole < job.steps)
    for (int64_t b = 0; b < count; ++b) {
      const int64_t bytes = (job.quads - job.whole * AMX_QUADS) * 64;
      std::memcpy(tail[b], job.weight.codes + ((block + b) * job.quads + job.whole * AMX_QUADS) * 64, bytes);
      std::memset(tail[b] + bytes, 0, TILE_BYTES - bytes);
    }
  const bool once = chunk.end - chunk.begin <= 2;
  const int64_t stride = once ? job.steps : AMX_CHUNK_STEPS, pairs = (chunk.end - chunk.begin) / 2;
  for (int64_t step = 0; step < job.steps; step += stride) {
    const Range steps{step, step + stride < job.steps ? step + stride : job.steps};
    const auto place = [&](int64_t tile, int64_t b) { return sums[stride < job.steps ? tile - chunk.begin : 0][0] + b * 16; };
    for (int64_t b = 0; b < count; b += 2)
      for (int64_t tile = chunk.begin; tile < chunk.begin + 2 * pairs; tile += 2) {
        if (count - b >= 2) amx_some<2, 2>(job, tile, block + b, steps, once, tail[b], place(tile, b));
        else amx_some<2, 1>(job, tile, block + b, steps, once, tail[b], place(tile, b));
      }
    const int64_t last = chunk.begin + 2 * pairs;
    if (last == chunk.end) continue;
    if (count == 4) amx_some<1, 4>(job, last, block, steps, once, tail[0], place(last, 0));
    else for (int64_t b = 0; b < count; ++b) amx_some<1, 1>(job, last, block + b, steps, once, tail[b], place(last, b));
  }
}

inline void amx_int8_rows(const AmxInt8Job& job, Range tiles, Range blocks) {
  if (tiles.begin == tiles.end || blocks.begin == blocks.end) return;
  const TileScope scope(job.tiles.config());
  for (int64_t tile = tiles.begin; tile < tiles.end; tile += AMX_CHUNK_TILES) {
    const Range chunk{tile, tile + AMX_CHUNK_TILES < tiles.end ? tile + AMX_CHUNK_TILES : tiles.end};
    for (int64_t block = blocks.begin; block < blocks.end; block += AMX_BLOCKS)
      amx_strip(job, chunk, block, blocks.end - block < AMX_BLOCKS ? blocks.end - block : AMX_BLOCKS);
  }
}

int64_t amx_int8_bytes(int64_t m, int64_t columns) {
  if (!amx_pays(m, columns)) return AVX512_VNNI.staged_int8.bytes(m, columns);
  const AmxRows tiles(m);
  return tiles.padded() * 12 + tiles.count * tiles.height * amx_steps(columns) * TILE_ROW_BYTES;
}

void amx_quantize_int8(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid given, int64_t part, int64_t parts,
                       void* memory) {
  if (!amx_pays(m, columns)) return AVX512_VNNI.staged_int8.quantize(x, stride, m, columns, given, part, parts, memory);
  const AmxRows tiles(m);
  const AmxInt8Activations to(memory, tiles);
  const int64_t steps = amx_steps(columns), step_bytes = tiles.height * TILE_ROW_BYTES;
  const Range mine = share(m, part, parts);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    int8_t* const q = to.q + (row / tiles.height * steps * tiles.height + row % tiles.height) * TILE_ROW_BYTES;
    const auto place = [&](int64_t i) { return q + i / 4 * step_bytes + i % 4 * 16; };
    with_grid(x + row * stride, columns, given, [&](auto values, auto its, RowGrid grid) {
      to.grid[row] = grid;
      to.offset[row] = quantize_row<values>(its, columns, grid, 4, Range{0, columns / 16 + 1}, place);
    });
  }
}

void amx_multiply_int8(const void* packed, const void* memory, int64_t m, const float* bias, Rows y, Share mine) {
  if (!amx_pays(m, static_cast<const Int8Weight*>(packed)->columns))
    return AVX512_VNNI.staged_int8.multiply(packed, memory, m, bias, y, mine);
  const Int8Weight& weight = *static_cast<const Int8Weight*>(packed);
  const AmxRows tiles(m);
  const AmxInt8Activations x(memory, tiles);
  const AmxInt8Job job(weight, tiles, x, bias, y);
  multiply_part(Tiles(m, TILE_MAX_ROWS), packed_blocks(weight.rows), mine,
                [&](Range my_tiles, Range my_blocks) { amx_int8_rows(job, my_tiles, my_blocks); });
}

void amx_int8(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y) {
  if (!amx_pays(m, weight.columns) || weight.rows == 0) return AVX512_VNNI.linear_int8(x, m, weight, given, bias, y);
  void* const memory = scratch(amx_int8_bytes(m, weight.columns));
  const AmxRows tiles(m);
  const AmxInt8Activations activations(memory, tiles);
  const AmxInt8Job job(weight, tiles, activations, bias, {y, weight.rows});
  const auto quantize = [&](int64_t part, int64_t parts) {
    amx_quantize_int8(x, weight.columns, m, weight.columns, given, part, parts, memory);
  };
  parallel(Tiles(m, TILE_MAX_ROWS), weight.columns, packed_blocks(weight.rows), quantize,
           [&](Range my_tiles, Range my_blocks) { amx_int8_rows(job, my_tiles, my_blocks); });
}

constexpr Staged AMX_STAGED_INT8 = {amx_int8_bytes, amx_quantize_int8, amx_multiply_int8};

}  // namespace
}  // namespace infer_native
