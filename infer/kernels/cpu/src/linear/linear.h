// Quantized linear layers for CPUs: y[m, rows] = x[m, columns] times the transpose of a packed weight, plus bias.
//
// Packed weights are blocks of 16 output rows; rows beyond the last are padded with zeros. NB = packed_blocks(rows).
//   lut4  codes uint8 [NB, G, 512], G = columns / 64; of a group, vector j (64 bytes) has columns 4j..4j+3 in its low
//         nibbles and 4j+32..4j+35 in its high ones, byte [row * 4 + i] being column i of that quad;
//         scale int8 [NB, G * S, 16], one for each 64 / S columns, S 1 or 4; table int8 [NB, 16];
//         row_scale float [NB, 16]; weight = table / 127 * scale / 127 * row_scale.
//   int8  codes int8 [NB, KQ, 16, 4], KQ = ceil(columns / 4); scale float [NB, 16].
// A weight is packed and used under one instruction set: those with unsigned multiplication store code + 128.
//
// The result of a row is bit-equal whatever the other rows and the number of threads; a row with NaN gives NaN.
#pragma once

#include <cstdint>

namespace infer_native {

constexpr int64_t BLOCK_ROWS = 16;
constexpr int64_t GROUP = 64;       // columns of activations with one quantization step
constexpr int64_t FINE_SCALES = 4;  // scales of a group with one for each 16 columns

// Whether weights are read faster without software prefetch where few rows are computed: the CPU's own prefetchers follow
// the streams, and prefetches into the first-level cache take the buffers of their misses. Set when the library is loaded.
extern const bool hardware_follows_streams;

inline int64_t packed_blocks(int64_t rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

struct Lut4Weight {
  const uint8_t* codes;
  const int8_t* scale;
  const int8_t* table;
  const float* row_scale;
  int64_t rows, columns;  // columns is a multiple of GROUP
  int64_t scales = 1;     // of a group: 1 or FINE_SCALES
};

struct Int8Weight {
  const int8_t* codes;
  const float* scale;
  int64_t rows, columns;  // at most 65536 columns: the sums are int32
  const int32_t* row_sum = nullptr;  // [NB, 16]: the sum of the codes (not of code + 128) of each row
};

// Quantizes activations to int8 for each row and 64 columns; the exact int32 sum of a group is scaled and added in float.
// With four scales a group has a sum for each 16 columns, added in two pairs, 0 and 2, then 1 and 3:
//   total = fma(fma(sum[i + 2], scale[i + 2], sum[i] * scale[i]), step, total).
void linear_lut4(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y);

// Quantization of the activations: one static step for all, or the range of each row, after a multiplication of its columns
// by `multiplier` (SmoothQuant: the columns of the weight were divided by it). At most one is not null.
struct InputGrid {
  const float* step = nullptr;
  const float* multiplier = nullptr;  // [columns]
  int64_t zero = -1;                  // of groupwise codes that are unsigned integers, their zero point
};

// Quantizes activations to int8 with `step[0]` in ±127, or where it is null each row by its own range, asymmetrically (after
// an activation function few numbers are negative, and half of the levels would be unused; MiniLM: error 0.074 → 0.050):
//   low = min(0, min x), high = max(0, max x), step = max((high - low) / 254, FLT_MIN),
//   zero = clamp(round(-127 - low / step), -127, 127), q = clamp(round(x / step) + zero, -127, 127),
//   y = float(sum(q * code) - zero * row_sum) * step * scale + bias,
// halves rounded to even, the int32 part exact. With a step, step = step[0], zero = 0 and q in ±127.
// `linear_packed.int8_twin` is the same in torch.
void linear_int8(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y);

// Multiplies float activations: y = sum(x * code) * scale + bias.
void linear_int8_weight(const float* x, int64_t m, const Int8Weight& weight, const float* bias, float* y);

// Packs a weight of 2- to 4-bit codes: `codes` are little-endian bit streams [rows, columns * bits / 8]; `table` [tables,
// 2**bits], one for all rows or one for each 32; `scale` [rows, columns / 64 * scales]. Table entries are rounded to int8 at
// the level of least error, and row_scale is divided by that level.
void pack_lut4(const uint8_t* codes, int bits, const float* table, int64_t tables, const int8_t* scale,
               const float* row_scale, int64_t rows, int64_t columns, int64_t scales, uint8_t* out_codes,
               int8_t* out_scale, int8_t* out_table, float* out_row_scale);

// Packs int8 codes [rows, columns] and scale [rows]; `out_row_sum` gets the sum of the codes of each row.
void pack_int8(const int8_t* codes, const float* scale, int64_t rows, int64_t columns, int8_t* out_codes,
               float* out_scale, int32_t* out_row_sum = nullptr);

}  // namespace infer_native

#define INFER_API __attribute__((visibility("default")))

extern "C" {
INFER_API const char* infer_isa();                // the active instruction set
INFER_API int infer_set_isa(const char* name);    // 0: set; 1: this CPU or build lacks it
INFER_API const char* infer_isas();               // instruction sets of this CPU, best first, comma-separated
}
