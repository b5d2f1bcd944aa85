// One table of functions for each instruction set; each is compiled with its own flags and dispatch.cpp picks one.
#pragma once

#include "kernels.h"

namespace infer_native {

struct Isa {
  const char* name;
  bool unsigned_weights;
  void (*linear_lut4)(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y);
  void (*linear_int8)(const float* x, int64_t m, const Int8Weight& weight, const float* x_scale, const float* bias,
                      float* y);
  void (*linear_int8_weight)(const float* x, int64_t m, const Int8Weight& weight, const float* bias, float* y);
};

// Each is defined where its architecture is.
extern const Isa AVX512_VNNI;
extern const Isa AVX2;
extern const Isa NEON_DOTPROD;
extern const Isa SCALAR;

const Isa& active_isa();

// At least `bytes` bytes at a multiple of 64, the same for every call of a thread: contents do not survive.
void* scratch(int64_t bytes);

}  // namespace infer_native
