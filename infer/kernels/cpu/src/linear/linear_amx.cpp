// Linear layers on the tile registers of AMX, and with AVX-512 VNNI for few rows, which are bound by memory.
#include "linear/vector_avx512.h"  // first: the kernels use its Vector
#include "linear/linear_lut4_amx.h"

namespace infer_native {
const AmxLinear AMX_LINEAR = {amx_lut4, amx_int8, AMX_STAGED_LUT4, AMX_STAGED_INT8};
}
