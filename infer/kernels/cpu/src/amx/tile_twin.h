// The tile instructions of AMX in plain C++, by number of register, as Intel's manual defines them (volume 2, "TDPBSSD",
// "TDPBF16PS"). Operands that raise an exception on the CPU end the process with a message.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "amx/tile_config.h"

namespace infer_native {
namespace {

struct TileTwin {
  struct State {
    TileConfig config;
    bool on = false;
    uint8_t bytes[8][TILE_MAX_ROWS][TILE_ROW_BYTES] = {};
  };
  static State& state() {
    thread_local State own;
    return own;
  }
  static void require(bool legal, const char* what) {
    if (legal) return;
    std::fprintf(stderr, "tile registers: %s\n", what);
    std::abort();
  }

  [[gnu::noinline]] static void configure(const TileConfig& config) {
    State& s = state();
    require(config.palette == 1 && config.start_row == 0, "only palette 1 from the first row");
    for (int i = 0; i < 16; ++i)
      require(i < 8 ? config.rows[i] <= TILE_MAX_ROWS && config.row_bytes[i] <= TILE_ROW_BYTES
                    : config.rows[i] == 0 && config.row_bytes[i] == 0, "a shape beyond the palette");
    s.config = config, s.on = true;
    std::memset(s.bytes, 0, sizeof s.bytes);
  }
  static void release() { state().on = false; }
  static State& shaped(int tile) {
    State& s = state();
    require(s.on && 0 <= tile && tile < 8 && s.config.rows[tile] > 0 && s.config.row_bytes[tile] > 0, "a tile without a shape");
    return s;
  }
  [[gnu::noinline]] static void zero(int tile) { std::memset(shaped(tile).bytes[tile], 0, TILE_BYTES); }
  [[gnu::noinline]] static void load(int tile, const void* p, int64_t stride) {
    State& s = shaped(tile);
    zero(tile);
    for (int r = 0; r < s.config.rows[tile]; ++r)
      std::memcpy(s.bytes[tile][r], static_cast<const char*>(p) + r * stride, s.config.row_bytes[tile]);
  }
  [[gnu::noinline]] static void store(int tile, void* p, int64_t stride) {
    State& s = shaped(tile);
    for (int r = 0; r < s.config.rows[tile]; ++r)
      std::memcpy(static_cast<char*>(p) + r * stride, s.bytes[tile][r], s.config.row_bytes[tile]);
  }

  // Calls each(two sums of a row and column, 4 bytes of A, 4 bytes of B) in the order of the instruction: k, then columns. The
  // two sums are added, then the previous value.
  template <class Number, class Each>
  static void dot(int sum, int a, int b, Each each) {
    State& s = shaped(sum);
    shaped(a), shaped(b);
    const TileConfig& c = s.config;
    require(sum != a && sum != b && a != b, "equal registers");
    require(c.rows[a] == c.rows[sum] && c.row_bytes[b] == c.row_bytes[sum] && c.row_bytes[a] == 4 * c.rows[b] &&
                c.row_bytes[sum] % 4 == 0, "shapes that do not fit each other");
    for (int m = 0; m < TILE_MAX_ROWS; ++m) {
      Number row[16][2] = {}, result[16] = {};
      for (int k = 0; m < c.rows[sum] && k < c.row_bytes[a] / 4; ++k)
        for (int n = 0; n < c.row_bytes[sum] / 4; ++n) each(row[n], s.bytes[a][m] + 4 * k, s.bytes[b][k] + 4 * n);
      for (int n = 0; m < c.rows[sum] && n < c.row_bytes[sum] / 4; ++n) {
        Number before;
        std::memcpy(&before, s.bytes[sum][m] + 4 * n, 4);
        result[n] = add(before, add(row[n][0], row[n][1]));
      }
      std::memcpy(s.bytes[sum][m], result, sizeof result);
    }
  }

  template <class Left, class Right>
  [[gnu::noinline]] static void dot_bytes(int sum, int a, int b) {
    dot<uint32_t>(sum, a, b, [](uint32_t (&sums)[2], const uint8_t* x, const uint8_t* w) {
      for (int i = 0; i < 4; ++i)
        sums[0] += static_cast<uint32_t>(static_cast<Left>(x[i]) * static_cast<Right>(w[i]));
    });
  }
  // Even and odd elements have separate sums, by fused products.
  [[gnu::noinline]] static void dot_bfloat16(int sum, int a, int b) {
    dot<float>(sum, a, b, [](float (&sums)[2], const uint8_t* x, const uint8_t* w) {
      for (int i = 0; i < 2; ++i) sums[i] = flushed(std::fma(widened(x + 2 * i), widened(w + 2 * i), sums[i]));
    });
  }

 private:
  static uint32_t add(uint32_t a, uint32_t b) { return a + b; }
  // Denormals are flushed to zero, operands and results, whatever the mode of the thread.
  static float flushed(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }
  static float add(float a, float b) { return flushed(flushed(a) + flushed(b)); }
  static float widened(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    const uint32_t bits = uint32_t{half} << 16;
    float v;
    std::memcpy(&v, &bits, 4);
    return flushed(v);
  }
};

}  // namespace
}  // namespace infer_native
