#include "state/state_scan.h"

namespace infer_native {
const StateKernel STATE_AVX512_VNNI = {conv_block, delta_block, ssd_block, selective_block, linear_block};
}
