// Linear layers with AVX-VNNI: AVX2 with vpdpbusd, as on desktop CPUs without AVX-512.
#include <cpuid.h>

#include "amx/tile_config.h"

#if !defined(INFER_AMX_ABSENT)  // compilers with AMX have AVX-VNNI too
#define INFER_AVX_VNNI
#endif
#include "linear/vector_avx2.h"  // first: the kernels use its Vector
#include "linear/linear_groupwise.h"
#include "linear/linear_int8.h"
#include "linear/linear_lut4.h"
#include "linear/linear_w8a32.h"

namespace infer_native {

bool has_avx_vnni() {
#if defined(INFER_AVX_VNNI_AS_AVX512)
  return true;
#elif defined(INFER_AVX_VNNI)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & 1u << 4) != 0;
#else
  return false;
#endif
}

const Isa AVX_VNNI = {"avx_vnni", Vector::UNSIGNED, run_lut4, run_int8, run_int8_weight,
    run_groupwise, STAGED_LUT4, STAGED_LUT4_FINE, STAGED_INT8, STAGED_INT8_WEIGHT, STAGED_GROUPWISE, {}, &AVX2};
}  // namespace infer_native
