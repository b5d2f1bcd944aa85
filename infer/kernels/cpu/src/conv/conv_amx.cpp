// Convolution tiles on the tile registers of AMX: 16 pixels are a tile of unsigned bytes, 16 quads of 16 channels one of weights.
//
// Up to two tiles of pixels meet two blocks of channels at a time, one tile four: four tiles of sums hide the latency of a
// product. Pixels that lie evenly apart are read where they are; else the bytes under each window are gathered first.
#include <array>
#include <cstring>

#include "amx/tiles.h"
#include "conv/conv_results_avx512.h"
#include "isa.h"

namespace infer_native {
namespace {

constexpr int64_t STEP_QUADS = 16, LEAST_PIXELS = 8;
constexpr int HIGH = 16;  // pixels of a tile
enum : int { SUMS = 0, PIXELS_A = 4, WEIGHTS_B = 6 };

// Addresses of the pixels of one tile: `pitch` bytes apart, of each run a range of whole steps.
struct Pixels {
  const uint8_t* first;
  int64_t pitch;
};

struct Steps {
  const Tile& tile;
  Pixels pixels[2];
  int64_t runs, whole;   // steps of a run without its tail
  const int64_t* offsets;  // of the runs
  const uint8_t* tail = nullptr;  // weights [block][16][64] of a step that is not whole
};

bool evenly(const Tile& tile, int begin, int count) {
  const int64_t pitch = count > 1 ? tile.x[begin + 1] - tile.x[begin] : 0;
  for (int i = 2; i < count; ++i)
    if (tile.x[begin + i] - tile.x[begin + i - 1] != pitch) return false;
  return count == HIGH;  // rows that are not pixels would be read beyond the image
}

// Gathers all bytes under the windows as [pixel][quads, zeros up to whole steps].
void gather(const Tile& tile, int64_t used, int64_t pitch, uint8_t* to) {
  const int64_t bytes = tile.quads * 4;
  for (int i = 0; i < tile.pixels; ++i, to += pitch) {
    for (int64_t r = 0; r < tile.num_runs; ++r) std::memcpy(to + r * bytes, tile.x[i] + tile.runs[r], bytes);
    std::memset(to + tile.num_runs * bytes, 0, used - tile.num_runs * bytes);
  }
}

template <int TILES, int BLOCKS>
[[gnu::always_inline]] inline void add_step(const uint8_t* const (&x)[2], const Pixels (&pixels)[2], const int8_t* weight,
                                            int64_t block_stride, int64_t quad_stride) {
  unrolled<TILES>([&](auto t) INFER_INLINE { AmxTiles::load<PIXELS_A + t>(x[t], pixels[t].pitch); });
  unrolled<BLOCKS>([&](auto b) INFER_INLINE {
    AmxTiles::load<WEIGHTS_B + b % 2>(weight + b * block_stride, quad_stride);
    unrolled<TILES>([&](auto t) INFER_INLINE {
      AmxTiles::dot_unsigned_signed<SUMS + t * BLOCKS + b, PIXELS_A + t, WEIGHTS_B + b % 2>();
    });
  });
}

// sums [pixel][64 channels]: blocks `block` on of a panel of `panel` blocks.
template <int TILES, int BLOCKS>
[[gnu::noinline]] void add_blocks(const Steps& steps, int panel, int block, int32_t* sums) {
  constexpr int64_t PITCH = CONV_PANEL * CONV_BLOCK * sizeof(int32_t);
  unrolled<TILES * BLOCKS>([&](auto i) INFER_INLINE { AmxTiles::zero<SUMS + i>(); });
  const int8_t* weight = steps.tile.weight + block * 64;
  const uint8_t* x[2] = {};
  for (int64_t r = 0; r < steps.runs; ++r) {
    unrolled<TILES>([&](auto t) INFER_INLINE { x[t] = steps.pixels[t].first + steps.offsets[r]; });
    for (int64_t s = 0; s < steps.whole; ++s, weight += STEP_QUADS * 64 * panel) {
      add_step<TILES, BLOCKS>(x, steps.pixels, weight, 64, 64 * panel);
      unrolled<TILES>([&](auto t) INFER_INLINE { x[t] += TILE_ROW_BYTES; });
    }
  }
  if (steps.tail)
    add_step<TILES, BLOCKS>(x, steps.pixels, reinterpret_cast<const int8_t*>(steps.tail) + block * TILE_BYTES, TILE_BYTES, 64);
  unrolled<TILES>([&](auto t) INFER_INLINE {
    unrolled<BLOCKS>([&](auto b) INFER_INLINE {
      AmxTiles::store<SUMS + t * BLOCKS + b>(sums + (t * HIGH * CONV_PANEL + block + b) * CONV_BLOCK, PITCH);
    });
  });
}

template <int BLOCKS>
void run(const Tile& tile) {
  const bool two = tile.pixels > HIGH, whole_runs = tile.quads % STEP_QUADS == 0;
  const int64_t quads = tile.num_runs * tile.quads, none = 0;
  Steps steps{tile, {}, tile.num_runs, tile.quads / STEP_QUADS, tile.runs};
  alignas(64) uint8_t tail[CONV_PANEL][STEP_QUADS][64];
  if (whole_runs && evenly(tile, 0, two ? HIGH : tile.pixels) && (!two || evenly(tile, HIGH, tile.pixels - HIGH))) {
    steps.pixels[0] = {tile.x[0], tile.x[1] - tile.x[0]};
    if (two) steps.pixels[1] = {tile.x[HIGH], tile.x[HIGH + 1] - tile.x[HIGH]};
  } else {
    // An odd number of lines: rows a power of two apart would share few sets of the first-level cache.
    const int64_t lines = (quads + STEP_QUADS - 1) / STEP_QUADS, pitch = (lines | 1) * TILE_ROW_BYTES;
    auto* const gathered = static_cast<uint8_t*>(scratch(pitch * 2 * HIGH));
    gather(tile, lines * TILE_ROW_BYTES, pitch, gathered);
    steps.pixels[0] = {gathered, pitch}, steps.pixels[1] = {gathered + HIGH * pitch, pitch};
    steps.runs = 1, steps.whole = quads / STEP_QUADS, steps.offsets = &none;
    if (const int64_t left = quads % STEP_QUADS) {
      std::memset(tail, 0, sizeof tail);
      for (int64_t q = 0; q < left; ++q)
        for (int b = 0; b < BLOCKS; ++b)
          std::memcpy(tail[b][q], tile.weight + ((steps.whole * STEP_QUADS + q) * BLOCKS + b) * 64, 64);
      steps.tail = tail[0][0];
    }
  }
  alignas(64) int32_t sums[2 * HIGH][CONV_PANEL * CONV_BLOCK];
  if (two) {
    for (int b = 0; b + 2 <= BLOCKS; b += 2) add_blocks<2, 2>(steps, BLOCKS, b, sums[0]);
    if (BLOCKS % 2) add_blocks<2, 1>(steps, BLOCKS, BLOCKS - 1, sums[0]);
  } else {
    add_blocks<1, BLOCKS>(steps, BLOCKS, 0, sums[0]);
  }
  const Results results(tile);
  for (int i = 0; i < tile.pixels; ++i) {
    __m512i sum[BLOCKS];
    unrolled<BLOCKS>([&](auto j) INFER_INLINE {
      sum[j] = _mm512_add_epi32(_mm512_load_si512(sums[i] + 16 * j), _mm512_loadu_si512(tile.start + 16 * j));
    });
    results.store<BLOCKS>(i, sum);
  }
}

void begin() {
  TileConfig shapes;
  for (int i = 0; i < 8; ++i) shapes.shape(i, TILE_MAX_ROWS, TILE_ROW_BYTES);
  AmxTiles::configure(shapes);
}

void end() { AmxTiles::release(); }

template <int BLOCKS>
constexpr std::array<TileKernel, 2 * HIGH> any_count() {
  std::array<TileKernel, 2 * HIGH> kernels{};
  for (auto& kernel : kernels) kernel = run<BLOCKS>;
  return kernels;
}

constexpr auto ONE = any_count<1>(), TWO = any_count<2>(), THREE = any_count<3>(), FOUR = any_count<4>();

}  // namespace

const ConvKernels CONV_AMX = {{ONE.data(), TWO.data(), THREE.data(), FOUR.data()},
                              {2 * HIGH, 2 * HIGH, 2 * HIGH, 2 * HIGH},
                              conv_quantize_row, conv_max_row, begin, end, LEAST_PIXELS, true};

}  // namespace infer_native
