// One table of functions for each instruction set; each is compiled with its own flags and isa.cpp picks one.
#pragma once

#include <atomic>

#include "instruction_set.h"
#include "linear/groupwise_weight.h"

namespace infer_native {

// Destination rows of results, `stride` floats apart.
struct Rows {
  float* data;
  int64_t stride;
  float* row(int64_t r) const { return data + r * stride; }
  Rows from(int64_t r) const { return {row(r), stride}; }
};

// Work of one thread of a team: a static part, or pieces of equal cost that threads claim from the counter `next`, 0 at the
// start (dynamic scheduling: a delayed thread claims fewer).
struct Share {
  int64_t part, parts;
  std::atomic<int64_t>* next;
};

// Returns whether threads quantize whole rows (those whose row operations they compute) rather than columns of all rows.
constexpr int64_t ROWS_A_THREAD = 8;
inline bool by_rows(int64_t m, int64_t parts) { return parts == 1 || m >= ROWS_A_THREAD * parts; }

// A linear layer as two steps that the threads of one region share. `memory` has `bytes(m, columns)` bytes at a multiple
// of 64. Between the steps every row must have been quantized.
struct Staged {
  int64_t (*bytes)(int64_t m, int64_t columns);
  // Quantizes the thread's part of x [m, columns], whose rows are `stride` floats apart.
  void (*quantize)(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid given, int64_t part, int64_t parts,
                   void* memory);
  // Computes the thread's part of y [m, rows].
  void (*multiply)(const void* weight, const void* memory, int64_t m, const float* bias, Rows y, Share mine);
};

// Kernels for groups of a multiple of 64, of 32 and of 16 columns.
struct StagedGroupwise {
  Staged whole, half, quarter;
  const Staged& of(int parts) const { return parts == 1 ? whole : parts == 2 ? half : quarter; }
};

enum Activation : int64_t { SILU, GELU_TANH, GELU_ERF, RELU, SIGMOID, TANH };

constexpr int64_t MAXIMA_BLOCK = 1024;  // logits of which each of 16 lanes keeps the maximum

// Operations on one row of floats between layers, in place where y is x.
struct RowKernels {
  // x / sqrt(mean(x^2) + eps) * (weight + offset); weight may be null.
  void (*rms_norm)(const float* x, const float* weight, float offset, float eps, int64_t width, float* y);
  // (x - mean) / sqrt(variance + eps) * weight + bias; both may be null.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t width, float* y);
  // activation(x) * other; other may be null.
  void (*activate)(int64_t kind, const float* x, const float* other, int64_t width, float* y);
  void (*add)(const float* a, const float* b, int64_t width, float* y);
  void (*multiply)(const float* a, const float* b, int64_t width, float* y);
  void (*scale)(const float* x, float factor, int64_t width, float* y);
  // The first `rotated` of `width` numbers in two halves (a, b): (a cos - b sin, b cos + a sin); the rest stays.
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t rotated, int64_t width, float* y);
  // Writes the maximum of every 16th number in each MAXIMA_BLOCK, maxima [ceil(width / MAXIMA_BLOCK)][16], -inf where there is
  // none; returns whether x has no NaN. Lanes are never reduced, so the loop needs no shuffles.
  bool (*block_maxima)(const float* x, int64_t width, float* maxima);
  // Writes exp((x - maximum) / temperature) to y, which may be null; returns the sum.
  float (*softmax_weights)(const float* x, float maximum, float temperature, int64_t width, float* y);
};

struct Isa {
  const char* name;
  bool unsigned_weights;
  void (*linear_lut4)(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y);
  void (*linear_int8)(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y);
  void (*linear_int8_weight)(const float* x, int64_t m, const Int8Weight& weight, const float* bias, float* y);
  void (*linear_groupwise)(const float* x, int64_t m, const GroupwiseWeight& weight, const float* bias, float* y);
  Staged staged_lut4, staged_lut4_fine, staged_int8, staged_int8_weight;
  StagedGroupwise staged_groupwise;
  RowKernels rows;
  const Isa* base = nullptr;  // instruction set of the other kernels, where this one has linear layers only
};

// Each is defined only on its architecture, and where it was compiled in.
INFER_OF_SET const Isa AVX512_VNNI;
INFER_OF_SET const Isa AVX2;
INFER_OF_SET const Isa AVX_VNNI;  // without `rows`: those of AVX2
INFER_OF_SET const Isa NEON_DOTPROD;
INFER_OF_SET const Isa SCALAR;

// Linear layers on AMX; the packed weights are those of AVX512_VNNI.
struct AmxLinear {
  void (*linear_lut4)(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y);
  void (*linear_int8)(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y);
  Staged staged_lut4, staged_int8;
};
INFER_OF_SET const AmxLinear AMX_LINEAR;

// "amx" where this process may use the tile registers (requested from the kernel once), "amx_emulated" in a build whose tiles are
// plain C++, else null. Only for CPUs that have AVX512_VNNI.
INFER_OF_SET const char* amx_name();

INFER_OF_SET bool has_avx_vnni();  // only for CPUs that have AVX2

const Isa& active_isa();

// Returns the active instruction set, or its base.
const Isa& vector_isa();

// Returns at least `bytes` bytes of the calling thread, 64-byte aligned; every call overwrites the contents of the last one.
void* scratch(int64_t bytes);

// Returns memory like that of `scratch`, for decoded scales, beside activations that are in `scratch`.
void* scale_scratch(int64_t bytes);

}  // namespace infer_native
