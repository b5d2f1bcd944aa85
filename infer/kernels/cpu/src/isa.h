// One table of functions for each instruction set; each is compiled with its own flags and isa.cpp picks one.
#pragma once

#include <atomic>

#include "linear/groupwise_weight.h"

namespace infer_native {

// Destination rows of results, `stride` floats apart.
struct Rows {
  float* data;
  int64_t stride;
  float* row(int64_t r) const { return data + r * stride; }
  Rows from(int64_t r) const { return {row(r), stride}; }
};

// Which work a thread of a team does: its fixed part, or of pieces that are all alike one after the other as it gets to
// them. `next` counts those that are taken, from 0; a thread that was held up then takes fewer.
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
  // A thread's part of x [m, columns], its rows `stride` floats apart.
  void (*quantize)(const float* x, int64_t stride, int64_t m, int64_t columns, InputGrid given, int64_t part, int64_t parts,
                   void* memory);
  // The part of y [m, rows] that is this thread's.
  void (*multiply)(const void* weight, const void* memory, int64_t m, const float* bias, Rows y, Share mine);
};

// Kernels for groups of a multiple of 64, of 32 and of 16 columns.
struct StagedGroupwise {
  Staged whole, half, quarter;
  const Staged& of(int parts) const { return parts == 1 ? whole : parts == 2 ? half : quarter; }
};

enum Activation : int64_t { SILU, GELU_TANH, GELU_ERF, RELU, SIGMOID, TANH };

constexpr int64_t STRETCH = 1024;  // logits whose largest, of each of 16 lanes, are kept

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
  // The largest of every 16th number in each STRETCH, tops [ceil(width / STRETCH)][16], -inf where there is none (so no
  // register is ever summed across); the result says whether there is no NaN.
  bool (*block_tops)(const float* x, int64_t width, float* tops);
  // exp((x - top) / heat) into y, which may be null; their sum.
  float (*weights)(const float* x, float top, float heat, int64_t width, float* y);
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
  const Isa* like = nullptr;  // whose other kernels serve an instruction set that has only linear layers of its own
};

// Each is defined only on its architecture.
extern const Isa AVX512_VNNI;
extern const Isa AVX2;
extern const Isa AVX_VNNI;  // without `rows`: those of AVX2
extern const Isa NEON_DOTPROD;
extern const Isa SCALAR;

// The linear layers that AMX has of its own; packed weights are those of AVX512_VNNI.
struct AmxLinear {
  void (*linear_lut4)(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y);
  void (*linear_int8)(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y);
  Staged staged_lut4, staged_int8;
};
extern const AmxLinear AMX_LINEAR;

// "amx" where this process may use the tile registers (requested from the kernel once), "amx_emulated" in a build whose tiles are
// plain C++, else null. Only for CPUs that have AVX512_VNNI.
const char* amx_name();

bool has_avx_vnni();  // only for CPUs that have AVX2

const Isa& active_isa();

// The active instruction set, or the one that it is like.
const Isa& vector_isa();

// At least `bytes` bytes at a multiple of 64, the same for every call of a thread: contents do not survive.
void* scratch(int64_t bytes);

}  // namespace infer_native
