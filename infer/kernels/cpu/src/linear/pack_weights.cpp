// Conversion of weights from the storage format (rows of bit streams) to the packed layouts of linear.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa.h"
#include "linear/groupwise_weight.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace infer_native {
namespace {

constexpr int64_t TABLE_ROWS = 32;

// Requests huge pages: a weight is read from memory once per token. Takes effect for pages that were not touched yet.
void advise_large_pages(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 1 << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(start) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + bytes) / PAGE * PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Returns code k of a row: bits k * bits and up of its little-endian stream. Codes may straddle two bytes.
int code_at(const uint8_t* row, int bits, int64_t k) {
  const int64_t bit = k * bits;
  const int shift = static_cast<int>(bit & 7);
  int value = row[bit >> 3] >> shift;
  if (shift + bits > 8) value |= row[(bit >> 3) + 1] << (8 - shift);
  return value & ((1 << bits) - 1);
}

// Widens a row of 2- or 3-bit codes to 4 bits.
void widen(const uint8_t* stream, int bits, int64_t columns, uint8_t* out) {
  for (int64_t k = 0; k < columns; k += 2)
    out[k / 2] = static_cast<uint8_t>(code_at(stream, bits, k) | code_at(stream, bits, k + 1) << 4);
}

// Packs 64 codes of a row, 32 bytes, as one quad in each of the 8 vectors of a group, 64 bytes apart.
void pack_group(const uint8_t* source, uint8_t* out) {
  alignas(32) uint8_t bytes[32];
  for (int64_t i = 0; i < 16; ++i) {
    bytes[2 * i] = static_cast<uint8_t>((source[i] & 15) | (source[i + 16] << 4));
    bytes[2 * i + 1] = static_cast<uint8_t>((source[i] >> 4) | (source[i + 16] & 0xF0));
  }
  for (int64_t quad = 0; quad < 8; ++quad) std::memcpy(out + quad * 64, bytes + quad * 4, 4);
}

// Rounds a table to int8 with the level of its largest entry, of 96..127, that has the least squared error: uniform tables
// become exact. Returns the factor from packed to float entries, times 127.
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
               const float* row_scale, int64_t rows, int64_t columns, int64_t scales, uint8_t* out_codes,
               int8_t* out_scale, int8_t* out_table, float* out_row_scale) {
  const int64_t blocks = packed_blocks(rows), groups = columns / GROUP, row_bytes = columns * bits / 8;
  const int entries = 1 << bits;
  advise_large_pages(out_codes, blocks * groups * 512);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t which = tables == 1 ? 0 : block * BLOCK_ROWS / TABLE_ROWS;
    const float factor = round_table(table + which * entries, entries, out_table + block * 16);
    uint8_t* block_codes = out_codes + block * groups * 512;
    int8_t* block_scale = out_scale + block * groups * scales * 16;
    std::memset(block_codes, 0, groups * 512);
    std::memset(block_scale, 0, groups * scales * 16);
    const int64_t first = block * BLOCK_ROWS, count = std::min(rows - first, BLOCK_ROWS);
    for (int64_t row = 0; row < BLOCK_ROWS; ++row) out_row_scale[first + row] = row < count ? row_scale[first + row] * factor : 0;
    std::vector<uint8_t> wide(bits == 4 ? 0 : BLOCK_ROWS * columns / 2);
    for (int64_t row = 0; row < count && bits != 4; ++row)
      widen(codes + (first + row) * row_bytes, bits, columns, wide.data() + row * columns / 2);
    const uint8_t* source = bits == 4 ? codes + first * row_bytes : wide.data();
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t row = 0; row < count; ++row) {
        pack_group(source + row * columns / 2 + group * 32, block_codes + group * 512 + row * 4);
        for (int64_t s = group * scales; s < (group + 1) * scales; ++s)
          block_scale[s * 16 + row] = scale[(first + row) * groups * scales + s];
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
    const int64_t first = block * BLOCK_ROWS, count = std::min(rows - first, BLOCK_ROWS);
    for (int64_t row = 0; row < BLOCK_ROWS; ++row) {
      out_scale[first + row] = row < count ? scale[first + row] : 0;
      if (out_row_sum == nullptr) continue;
      int32_t sum = 0;
      for (int64_t k = 0; row < count && k < columns; ++k) sum += codes[(first + row) * columns + k];
      out_row_sum[first + row] = sum;
    }
    for (int64_t start = 0; start < columns; start += 64)  // the quads written fit the L1 cache
      for (int64_t row = 0; row < count; ++row)
        for (int64_t k = start; k < std::min(start + 64, columns); k += 4) {
          const int8_t* given = codes + (first + row) * columns + k;
          uint32_t quad = 0;
          if (k + 4 <= columns)
            std::memcpy(&quad, given, 4);
          else
            std::memcpy(&quad, given, columns - k);
          quad ^= zero ? 0x80808080u : 0u;
          std::memcpy(block_codes + k * 16 + row * 4, &quad, 4);
        }
  }
}

namespace {

// Packs 64 integers of a row as quads in the vectors of a group, as `PlaneVectors` reads them.
void pack_plane_group(const uint8_t* value, int planes, uint8_t* out) {
  const int low_bits = planes < 4 ? 2 : 4, high_bits = planes - low_bits, shared = 4 / low_bits, vectors = high_bits == 2 ? 2 : 4;
  const int low_mask = (1 << low_bits) - 1;
  for (int first = 0; first < 8; first += vectors) {
    uint8_t* const low = high_bits == 0 ? out : out + 64;
    for (int n = 0; n < 2 * vectors; ++n)
      for (int i = 0; i < 4; ++i) {
        const int code = value[4 * (first + n / 2) + n % 2 * 32 + i];
        low[n / 2 / shared * 64 + i] |= static_cast<uint8_t>((code & low_mask) << n % (2 * shared) * low_bits);
        if (high_bits != 0) out[i] |= static_cast<uint8_t>(code >> low_bits << n * high_bits);
      }
    out = low + vectors / shared * 64;
  }
}

}  // namespace

void pack_planes(const uint8_t* codes, int bits, int add, int planes, int64_t rows, int64_t columns, uint8_t* out) {
  const int64_t blocks = packed_blocks(rows), groups = columns / GROUP, group_bytes = planes * 128;
  advise_large_pages(out, blocks * groups * group_bytes);
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    uint8_t* const to = out + block * groups * group_bytes;
    std::memset(to, 0, groups * group_bytes);
    const int64_t first = block * BLOCK_ROWS, count = std::min(rows - first, BLOCK_ROWS);
    uint8_t values[GROUP];
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t row = 0; row < count; ++row) {
        const uint8_t* source = codes + (first + row) * columns * bits / 8;
        for (int64_t k = 0; k < GROUP; ++k) {
          const int code = bits == 8 ? source[group * GROUP + k] : code_at(source, bits, group * GROUP + k);
          values[k] = static_cast<uint8_t>(code + add);
        }
        pack_plane_group(values, planes, to + group * group_bytes + row * 4);
      }
  }
}

}  // namespace infer_native
