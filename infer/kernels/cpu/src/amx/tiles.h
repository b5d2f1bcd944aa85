// The eight tile registers of AMX behind one interface: the instructions, or with INFER_AMX_EMULATED a plain C++ twin of them,
// by which packing, tiling and tails are tested on any CPU. A tile has up to 16 rows of up to 64 bytes.
//
// Inline assembly: the intrinsics of gcc 12 do not declare that they access memory, and need compiler flags.
#pragma once

#include "amx/tile_config.h"

#if defined(INFER_AMX_EMULATED) || defined(INFER_AMX_ABSENT)
#define INFER_AMX_TWIN
#include "amx/tile_twin.h"
#endif

namespace infer_native {
namespace {

#if !defined(INFER_AMX_TWIN)

// Template arguments are numbers of registers. A is [rows][k quads], B [k quads][columns], a quad 4 bytes.
struct AmxTiles {
  static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
  // Also releases the tile state, so that a context switch does not save it.
  static void release() { asm volatile("tilerelease"); }
  template <int TILE>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
  }
  // Rows are `stride` bytes apart.
  template <int TILE>
  static void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(TILE), "r"(p), "r"(stride) : "memory");
  }
  template <int TILE>
  static void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(TILE), "r"(p), "r"(stride) : "memory");
  }
  // SUM += A * B with bytes, signed or not, and int32 sums.
  template <int SUM, int A, int B>
  static void dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
  }
  template <int SUM, int A, int B>
  static void dot_signed_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
  }
  template <int SUM, int A, int B>
  static void dot_unsigned_signed() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
  }
  // SUM += A * B with pairs of bfloat16 and float sums.
  template <int SUM, int A, int B>
  static void dot_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
  }
};

#else

struct AmxTiles {
  static void configure(const TileConfig& config) { TileTwin::configure(config); }
  static void release() { TileTwin::release(); }
  template <int TILE>
  static void zero() { TileTwin::zero(TILE); }
  template <int TILE>
  static void load(const void* p, int64_t stride) { TileTwin::load(TILE, p, stride); }
  template <int TILE>
  static void store(void* p, int64_t stride) { TileTwin::store(TILE, p, stride); }
  template <int SUM, int A, int B>
  static void dot_signed_unsigned() { TileTwin::dot_bytes<int8_t, uint8_t>(SUM, A, B); }
  template <int SUM, int A, int B>
  static void dot_signed_signed() { TileTwin::dot_bytes<int8_t, int8_t>(SUM, A, B); }
  template <int SUM, int A, int B>
  static void dot_unsigned_signed() { TileTwin::dot_bytes<uint8_t, int8_t>(SUM, A, B); }
  template <int SUM, int A, int B>
  static void dot_bfloat16() { TileTwin::dot_bfloat16(SUM, A, B); }
};

#endif

// Loads the tile configuration; releases it at the end of the scope.
class TileScope {
 public:
  explicit TileScope(const TileConfig& config) { AmxTiles::configure(config); }
  ~TileScope() { AmxTiles::release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace
}  // namespace infer_native
