// Many queries of bfloat16 on the tile registers of AMX.
#include "attend/attend_bfloat16.h"
#include "amx/tiles.h"

namespace infer_native {
namespace {

class AmxProducts {
 public:
  AmxProducts() : scope_(shapes()) {}

  static void multiply(const uint16_t* rows, const uint16_t* columns, int64_t apart, int64_t steps, float* to, int64_t stride) {
    unroll<4>([&](auto i) { AmxTiles::zero<SUMS + i>(); });
    const auto* a = reinterpret_cast<const char*>(rows);
    const auto* b = reinterpret_cast<const char*>(columns);
    for (int64_t step = 0; step < steps; ++step, a += STEP_BYTES, b += STEP_BYTES) {
      AmxTiles::load<ROWS_A>(a, TILE_ROW_BYTES);
      unroll<4>([&](auto i) {
        AmxTiles::load<COLUMNS_B + i % 2>(b + i * apart, TILE_ROW_BYTES);
        AmxTiles::dot_bfloat16<SUMS + i, ROWS_A, COLUMNS_B + i % 2>();
      });
    }
    unroll<4>([&](auto i) { AmxTiles::store<SUMS + i>(to + i * 16, stride * 4); });
  }

 private:
  static constexpr int64_t STEP_BYTES = TILE_BYTES;
  enum : int { SUMS = 0, ROWS_A = 4, COLUMNS_B = 6 };

  static TileConfig shapes() {
    TileConfig made;
    for (int i = 0; i < 8; ++i) made.shape(i, TILE_MAX_ROWS, TILE_ROW_BYTES);
    return made;
  }
  const TileScope scope_;
};

}  // namespace

void attend_tile_amx(const AttendArgs& args, const Piece& piece) { attend_tile_bfloat16<AmxProducts>(args, piece); }

}  // namespace infer_native
