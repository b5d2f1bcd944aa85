// Many queries of bfloat16 with VDPBF16PS of AVX-512 BF16: twice the products of a float multiply-add.
#include "attend/attend_bfloat16.h"

namespace infer_native {
namespace {

// As inline assembly, which needs no flag of the compiler: like float products, but denormals are zeros and sums are of pairs.
inline void add_products(__m512& sum, __m512i pair, __m512i columns) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pair), "v"(columns));
}

struct VectorProducts {
  static void multiply(const uint16_t* rows, const uint16_t* columns, int64_t apart, int64_t steps, float* to, int64_t stride) {
    strip<6>(rows, columns, apart, steps, to, stride);
    strip<6>(rows + 6 * DEPTH_STEP, columns, apart, steps, to + 6 * stride, stride);
    strip<4>(rows + 12 * DEPTH_STEP, columns, apart, steps, to + 12 * stride, stride);
  }

 private:
  static constexpr int PAIRS = DEPTH_STEP / 2;

  // HEIGHT rows of the 16: as many sums as registers hold beside the columns. Inlined, gcc 12 keeps the sums in memory.
  template <int HEIGHT>
  __attribute__((noinline)) static void strip(const uint16_t* rows, const uint16_t* columns, int64_t apart, int64_t steps, float* to,
                                              int64_t stride) {
    __m512 sums[HEIGHT][4];
#pragma GCC unroll 6
    for (int r = 0; r < HEIGHT; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[r][v] = _mm512_setzero_ps();
    const auto* a = reinterpret_cast<const int32_t*>(rows);
    const auto* b = reinterpret_cast<const char*>(columns);
    for (int64_t step = 0; step < steps; ++step, a += HIGH * PAIRS)
      for (int pair = 0; pair < PAIRS; ++pair, b += 64) {
        __m512i y[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) y[v] = _mm512_load_si512(b + v * apart);
#pragma GCC unroll 6
        for (int r = 0; r < HEIGHT; ++r) {
          const __m512i x = _mm512_set1_epi32(a[r * PAIRS + pair]);
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) add_products(sums[r][v], x, y[v]);
        }
      }
#pragma GCC unroll 6
    for (int r = 0; r < HEIGHT; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) _mm512_storeu_ps(to + r * stride + v * 16, sums[r][v]);
  }
};

}  // namespace

void attend_tile_avx512_bf16(const AttendArgs& args, const Piece& piece) {
  attend_tile_bfloat16<VectorProducts>(args, piece);
}

}  // namespace infer_native
