// Attention with AVX-512 VNNI.
#include "attend/lane_avx512.h"  // before what is written for its Lane
#include "attend/attend_decode.h"
#include "attend/attend_encoder_tile.h"
#include "attend/attend_tile.h"
#include "attend/attend_write.h"

namespace infer_native {
const AttendKernel ATTEND_AVX512_VNNI = {decodes, write_cache, decode, merge, attend_tile, 8 * Lane::TILE_ROWS, attend_all_tile};
}
