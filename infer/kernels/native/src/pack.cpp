// From the storage format (rows of bit streams) to the packed layout of kernels.h.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace infer_native {
namespace {

constexpr int64_t TABLE_ROWS = 32;

// A weight read once per token from memory gains from large pages; the advice counts for pages not yet touched.
void advise_large_pages(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 1 << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(start) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + bytes) / PAGE * PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Code k of a row: bits k * bits and up of its little-endian stream. 3-bit codes may straddle two bytes.
int code_at(const uint8_t* row, int bits, int64_t k) {
  const int64_t bit = k * bits;
  const int shift = static_cast<int>(bit & 7);
  int value = row[bit >> 3] >> shift;
  if (shift + bits > 8) value |= row[(bit >> 3) + 1] << (8 - shift);
  return value & ((1 << bits) - 1);
}

// The int8 level of the largest entry, of 96..127, that loses least of the table: uniform tables become exact.
// Returns the factor from packed to float entries, times 127.
float round_table(const float* table, int entries, int8_t* out) {
  float largest = 0;
  for (int i = 0; i < entries; ++i) largest = std::max(largest, std::fabs(table[i]));
  std::memset(out, 0, 16);
  if (!(largest > 0) || !std::isfinite(largest)) return largest;
  double best = INFINITY;
  int best_level = 127;
  for (int level = 127; level >= 96; --level) {
    double error = 0;
    for (int i = 0; i < entries; ++i) {
      const double exact = static_cast<double>(table[i]) / largest * level;
      error += std::pow((exact - std::nearbyint(exact)) / level, 2);
    }
    if (error < best * 0.99) best = error, best_level = level;
  }
  for (int i = 0; i < entries; ++i)
    out[i] = static_cast<int8_t>(std::nearbyint(static_cast<double>(table[i]) / largest * best_level));
  return static_cast<float>(static_cast<double>(largest) * 127 / best_level);
}

}  // namespace

void pack_lut4(const uint8_t* codes, int bits, const float* table, int64_t tables, const int8_t* scale,
               const float* row_scale, int64_t rows, int64_t columns, uint8_t* out_codes, int8_t* out_scale,
               int8_t* out_table, float* out_row_scale) {
  const int64_t blocks = packed_blocks(rows), groups = columns / GROUP, row_bytes = columns * bits / 8;
  const int entries = 1 << bits;
  advise_large_pages(out_codes, blocks * groups * 512);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t which = tables == 1 ? 0 : block * BLOCK_ROWS / TABLE_ROWS;
    const float factor = round_table(table + which * entries, entries, out_table + block * 16);
    uint8_t* block_codes = out_codes + block * groups * 512;
    int8_t* block_scale = out_scale + block * groups * 16;
    std::memset(block_codes, 0, groups * 512);
    std::memset(block_scale, 0, groups * 16);
    for (int64_t row = 0; row < BLOCK_ROWS; ++row) {
      const int64_t n = block * BLOCK_ROWS + row;
      out_row_scale[n] = n < rows ? row_scale[n] * factor : 0;
      if (n >= rows) continue;
      const uint8_t* stream = codes + n * row_bytes;
      for (int64_t k = 0; k < columns; ++k) {
        const int64_t group = k / GROUP, column = k % 32, high = k % GROUP / 32;
        uint8_t& byte = block_codes[group * 512 + column / 4 * 64 + row * 4 + column % 4];
        byte = static_cast<uint8_t>(byte | code_at(stream, bits, k) << (4 * high));
      }
      for (int64_t group = 0; group < groups; ++group)
        block_scale[group * 16 + row] = scale[n * groups + group];
    }
  }
}

void pack_int8(const int8_t* codes, const float* scale, int64_t rows, int64_t columns, int8_t* out_codes,
               float* out_scale, int32_t* out_row_sum) {
  const int64_t blocks = packed_blocks(rows), quads = (columns + 3) / 4;
  const int8_t zero = active_isa().unsigned_weights ? INT8_MIN : 0;  // code + 128 flips the sign bit
  advise_large_pages(out_codes, blocks * quads * 64);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    int8_t* block_codes = out_codes + block * quads * 64;
    std::memset(block_codes, zero, quads * 64);
    for (int64_t row = 0; row < BLOCK_ROWS; ++row) {
      const int64_t n = block * BLOCK_ROWS + row;
      out_scale[n] = n < rows ? scale[n] : 0;
      int32_t sum = 0;
      for (int64_t k = 0; n < rows && k < columns; ++k) {
        sum += codes[n * columns + k];
        block_codes[k / 4 * 64 + row * 4 + k % 4] = static_cast<int8_t>(codes[n * columns + k] ^ zero);
      }
      if (out_row_sum != nullptr) out_row_sum[n] = sum;
    }
  }
}

}  // namespace infer_native
