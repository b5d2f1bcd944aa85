// The shapes of the tile registers of AMX. A tile has up to 16 rows of up to 64 bytes.
#pragma once

#include <cstdint>

// A compiler without AMX has an assembler without AMX.
#if !defined(INFER_AMX_EMULATED) && !__has_include(<amxtileintrin.h>)
#define INFER_AMX_ABSENT
#endif

namespace infer_native {
namespace {

constexpr int TILE_MAX_ROWS = 16, TILE_ROW_BYTES = 64, TILE_BYTES = TILE_MAX_ROWS * TILE_ROW_BYTES;

// The 64 bytes that LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void shape(int tile, int64_t height, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(height);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "the layout is the CPU's");

}  // namespace
}  // namespace infer_native
