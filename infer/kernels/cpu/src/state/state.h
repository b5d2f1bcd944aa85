// Layers with a state cache: the operators of infer/kernels/ops/state_space/state_cache.py, all operands float32 and dense.
#pragma once

#include <cstdint>

#include "instruction_set.h"

namespace infer_native {

// Rows of the state cache and the segments of tokens that read and write them, computed in order.
struct StateRows {
  float* cache;
  int64_t rows, row_floats, offset;  // the layer's part of a row begins at `offset`
  const int64_t* segments;           // [count][4]: first token, end token, row read or -1, row written or -1
  int64_t count;

  const float* read(int64_t segment) const { return at(segments[4 * segment + 2]); }
  float* written(int64_t segment) const { return at(segments[4 * segment + 3]); }
  int64_t first(int64_t segment) const { return segments[4 * segment]; }
  int64_t end(int64_t segment) const { return segments[4 * segment + 1]; }

 private:
  float* at(int64_t row) const { return row < 0 ? nullptr : cache + row * row_floats + offset; }
};

constexpr int64_t MAX_TAPS = 16, MAX_STATES = 512;  // of a convolution; key width or states of a scan

struct ConvArgs {
  StateRows state;
  const float *x, *weight, *bias;  // [tokens, channels], [channels, taps], [channels] or null
  float* out;
  int64_t tokens, channels, taps;
  bool silu;
};

struct DeltaArgs {
  StateRows state;
  const float *query, *key, *value, *decay, *beta;
  float* out;
  int64_t tokens, key_heads, heads, key_width, width;
};

// Arguments of Mamba2, with one decay per head, and of Mamba, where `heads` counts groups and `width` their channels.
struct ScanArgs {
  StateRows state;
  const float *x, *step, *a, *b, *c;
  float* out;
  int64_t tokens, heads, width, groups, states;
};

struct LinearScanArgs {
  StateRows state;
  const float *decay, *x;
  float* out;
  int64_t tokens, channels;
};

// Kernels of one instruction set: each computes all segments of one block of BLOCK channels or columns.
constexpr int64_t BLOCK = 16;
inline int64_t blocks_of(int64_t width) { return (width + BLOCK - 1) / BLOCK; }

struct StateKernel {
  void (*conv)(const ConvArgs& args, int64_t block);
  void (*delta)(const DeltaArgs& args, int64_t head, int64_t block);
  void (*ssd)(const ScanArgs& args, int64_t head, int64_t block);
  void (*selective)(const ScanArgs& args, int64_t group, int64_t block);
  void (*linear)(const LinearScanArgs& args, int64_t block);
};

INFER_OF_SET const StateKernel STATE_AVX512_VNNI;
INFER_OF_SET const StateKernel STATE_AVX2;
INFER_OF_SET const StateKernel STATE_SCALAR;  // compiler vectors, any CPU

void causal_conv(const ConvArgs& args);
void gated_delta(const DeltaArgs& args);
void ssd_scan(const ScanArgs& args);
void selective_scan(const ScanArgs& args);
void linear_scan(const LinearScanArgs& args);

}  // namespace infer_native
