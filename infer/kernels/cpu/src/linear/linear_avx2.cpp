// Linear layers with AVX2.
#include "linear/vector_avx2.h"  // first: the kernels use its Vector
#include "linear/linear_groupwise.h"
#include "linear/linear_int8.h"
#include "linear/linear_lut4.h"
#include "linear/linear_w8a32.h"
#include "row_ops.h"

namespace infer_native {
const Isa AVX2 = {"avx2", Vector::UNSIGNED, run_lut4, run_int8, run_int8_weight,
    run_groupwise, STAGED_LUT4, STAGED_LUT4_FINE, STAGED_INT8, STAGED_INT8_WEIGHT, STAGED_GROUPWISE, ROWS};
}
