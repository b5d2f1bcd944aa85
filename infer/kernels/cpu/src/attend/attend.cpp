// Distribution of attention among threads: pieces are claimed from one counter, the most expensive first where known.
#include "attend/attend.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "attend/attend_kernel.h"
#include "isa.h"
#include "thread_buffer.h"

namespace infer_native {
namespace {

constexpr int64_t SERIAL_WORK = 1 << 17;  // products below which waking a team costs more than it saves
constexpr int64_t READING = 4;            // reading a key or value costs as much as this many products
constexpr int64_t PIECES_PER_PART = 2;
constexpr int64_t ALL_ROWS = 192;  // queries of an encoder that share one reading of the keys

#if defined(__x86_64__)
// The kernels of AVX-512 VNNI but for many queries.
AttendKernel with_tile(void (*tile)(const AttendArgs&, const Piece&)) {
  AttendKernel made = ATTEND_AVX512_VNNI;
  made.tile = tile;
  return made;
}
#endif

const AttendKernel& kernel() {
  [[maybe_unused]] const Isa* isa = &vector_isa();
#if defined(__x86_64__)
  if (isa == &AVX512_VNNI) {
    static const AttendKernel amx = with_tile(attend_tile_amx), bfloat16 = with_tile(attend_tile_avx512_bf16);
    if (isa != &active_isa()) return amx;
    return __builtin_cpu_supports("avx512bf16") ? bfloat16 : ATTEND_AVX512_VNNI;
  }
  if (isa == &AVX2) return ATTEND_AVX2;
#elif defined(__aarch64__)
  if (isa == &NEON_DOTPROD) return ATTEND_NEON_DOTPROD;
#endif
  return ATTEND_SCALAR;
}

// Partition of a sequence into pieces; the result does not depend on it.
struct Cut {
  int64_t pieces;       // of each KV head
  int64_t tile_tokens;  // 0: the decoding path
  int64_t partials;     // floats of one head, 0 where it is not split
};

struct Plan {
  const AttendArgs& args;
  const AttendKernel& isa;
  int64_t group, work = 0, target = 0;
  bool lone;  // no sequence has more than one new token, and no token is of none: the thread that reads it writes it

  Plan(const AttendArgs& given, int64_t parts) : args(given), isa(kernel()), group(group_size(given)) {
    lone = args.query_start[0] == 0 && args.query_start[args.sequences] == args.tokens;
    for (int64_t b = 0; b < args.sequences; ++b) {
      const Span span(args, b);
      work += args.kv_heads * head_work(span);
      lone = lone && span.count <= 1;
    }
    target = parts > 1 ? work / (parts * PIECES_PER_PART) + 1 : work + 1;
  }

  int64_t head_work(const Span& span) const {
    return span.count > 0 ? (span.high - span.low) * (span.count * group + READING) * args.head_dim : 0;
  }

  Cut cut(const Span& span) const {
    if (span.count <= 0) return {0, 0, 0};
    const int64_t rows = span.count * group;
    if (rows > FEW_ROWS || !isa.decodes(args)) {
      const int64_t tokens = std::max<int64_t>(1, isa.tile_rows / group);
      return {(span.count + tokens - 1) / tokens, tokens, 0};
    }
    const int64_t chunks = span.chunks(), wanted = (head_work(span) + target - 1) / target;
    const int64_t pieces = std::max<int64_t>(1, std::min(wanted, chunks));
    return {pieces, 0, pieces > 1 ? chunks * partial_floats(args, rows) : 0};
  }
};

void attend_piece(const Plan& plan, const Span& span, const Cut& cut, Piece piece, int64_t index, float* partials) {
  if (plan.lone && index == cut.pieces - 1) {  // the last piece sees the new token, others don't
    const int64_t item = span.first * plan.args.kv_heads + piece.head;
    plan.isa.write(plan.args, item, item + 1);
  }
  if (cut.tile_tokens) {
    piece.begin = (cut.pieces - 1 - index) * cut.tile_tokens;  // the last tokens see most
    piece.end = std::min(piece.begin + cut.tile_tokens, span.count);
    return plan.isa.tile(plan.args, piece);
  }
  const int64_t chunks = span.chunks(), first = span.first_chunk();
  piece.begin = first + chunks * index / cut.pieces;
  piece.end = first + chunks * (index + 1) / cut.pieces;
  if (cut.partials) partials += piece.head * cut.partials + (piece.begin - first) * partial_floats(plan.args, span.count * plan.group);
  plan.isa.decode(plan.args, piece, cut.partials ? partials : nullptr);
}

}  // namespace

void* attend_workspace(int64_t bytes) {
  thread_local ThreadBuffer buffer;
  return buffer.of(bytes);
}

void* attend_scratch(int64_t bytes) {
  thread_local ThreadBuffer buffer;
  return buffer.of(bytes);
}

int64_t attend_scratch_bytes(const AttendArgs& args, int64_t parts) {
  const Plan plan(args, parts);
  int64_t floats = 0;
  for (int64_t b = 0; b < args.sequences; ++b) floats += args.kv_heads * plan.cut(Span(args, b)).partials;
  return floats * static_cast<int64_t>(sizeof(float));
}

void attend_in_team(const AttendArgs& args, Team& team, std::atomic<int64_t>& next) {
  const int64_t part = team.part, parts = team.parts;
  const Plan plan(args, parts);
  auto* const partials = static_cast<float*>(args.scratch);
  if (!plan.lone) {
    const int64_t written = args.tokens * args.kv_heads;
    plan.isa.write(args, written * part / parts, written * (part + 1) / parts);
    team.synchronize();
  }
  int64_t ticket = next.fetch_add(1, std::memory_order_relaxed), before = 0, offset = 0;
  bool split = false;
  for (int64_t b = 0; b < args.sequences; ++b) {
    const Span span(args, b);
    const Cut cut = plan.cut(span);
    split = split || cut.partials;
    for (; ticket < before + cut.pieces * args.kv_heads; ticket = next.fetch_add(1, std::memory_order_relaxed)) {
      team.prefetcher.fetch(Team::BURST);
      const int64_t mine = ticket - before, index = mine / args.kv_heads;
      attend_piece(plan, span, cut, Piece{b, mine % args.kv_heads, 0, 0}, index, partials + offset);
    }
    before += cut.pieces * args.kv_heads;
    offset += cut.partials * args.kv_heads;
  }
  if (!split) return;
  team.synchronize();
  int64_t item = 0;
  offset = 0;
  for (int64_t b = 0; b < args.sequences; ++b) {
    const Cut cut = plan.cut(Span(args, b));
    if (!cut.partials) continue;
    for (int64_t head = 0; head < args.kv_heads; ++head, ++item, offset += cut.partials)
      if (item % parts == part) plan.isa.merge(args, Piece{b, head, 0, 0}, partials + offset);
  }
}

void attend_all_in_team(const AttendAllArgs& args, std::atomic<int64_t>& next) {
  const AttendKernel& isa = kernel();
  const int64_t tiles = (args.tokens + ALL_ROWS - 1) / ALL_ROWS, pieces = args.batches * args.query_heads * tiles;
  for (int64_t piece = next.fetch_add(1); piece < pieces; piece = next.fetch_add(1)) {
    const int64_t tile = piece % tiles, head = piece / tiles % args.query_heads, batch = piece / tiles / args.query_heads;
    const int64_t tokens = args.length(batch), own = (tokens + ALL_ROWS - 1) / ALL_ROWS;
    if (tile < own) isa.all(args, batch, head, tokens * tile / own, tokens * (tile + 1) / own);
  }
}

void attend(const AttendArgs& given) {
  AttendArgs args = given;
  if (args.tokens == 0) return;
  int64_t threads = omp_get_max_threads();
  if (Plan(args, 1).work < SERIAL_WORK) threads = 1;
  std::atomic<int64_t> next{0};
  if (threads == 1) {
    Team single(nullptr, 0, 1);
    return attend_in_team(args, single, next);
  }
  const int64_t meeting = Barrier::bytes(threads);
  auto* const memory = static_cast<char*>(attend_scratch(meeting + attend_scratch_bytes(args, threads)));
  std::memset(memory, 0, static_cast<size_t>(meeting));
  args.scratch = memory + meeting;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    Team team(memory, omp_get_thread_num(), omp_get_num_threads());
    attend_in_team(args, team, next);
  }
}

}  // namespace infer_native
