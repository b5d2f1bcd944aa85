// Distribution of the blocks of a state layer among threads: blocks are independent, each goes through all segments.
#include "state/state.h"

#include <omp.h>

#include "isa.h"

namespace infer_native {
namespace {

constexpr int64_t SERIAL_WORK = 1 << 16;  // products below which waking a team costs more than it saves

const StateKernel& kernel() {
#if defined(__x86_64__)
  const Isa* isa = &vector_isa();
  if (isa == &AVX512_VNNI) return STATE_AVX512_VNNI;
  if (isa == &AVX2) return STATE_AVX2;
#endif
  return STATE_SCALAR;
}

template <class Function>
void each(int64_t parts, int64_t products, Function function) {
  int64_t threads = products / SERIAL_WORK + 1;
  if (threads > omp_get_max_threads()) threads = omp_get_max_threads();
  if (threads > parts) threads = parts;
  if (threads <= 1) {
    for (int64_t i = 0; i < parts; ++i) function(i);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
  for (int64_t i = 0; i < parts; ++i) function(i);
}

}  // namespace

void causal_conv(const ConvArgs& args) {
  const StateKernel& isa = kernel();
  each(blocks_of(args.channels), args.tokens * args.channels * (args.taps + (args.silu ? 16 : 0)),
       [&](int64_t i) { isa.conv(args, i); });
}

void gated_delta(const DeltaArgs& args) {
  const StateKernel& isa = kernel();
  const int64_t blocks = blocks_of(args.width);
  each(args.heads * blocks, 3 * args.tokens * args.heads * args.key_width * args.width,
       [&](int64_t i) { isa.delta(args, i / blocks, i % blocks); });
}

void ssd_scan(const ScanArgs& args) {
  const StateKernel& isa = kernel();
  const int64_t blocks = blocks_of(args.width);
  each(args.heads * blocks, 3 * args.tokens * args.heads * args.states * args.width,
       [&](int64_t i) { isa.ssd(args, i / blocks, i % blocks); });
}

void selective_scan(const ScanArgs& args) {
  const StateKernel& isa = kernel();
  const int64_t blocks = blocks_of(args.width);
  each(args.groups * blocks, 16 * args.tokens * args.groups * args.width * args.states,
       [&](int64_t i) { isa.selective(args, i / blocks, i % blocks); });
}

void linear_scan(const LinearScanArgs& args) {
  const StateKernel& isa = kernel();
  each(blocks_of(args.channels), args.tokens * args.channels, [&](int64_t i) { isa.linear(args, i); });
}

}  // namespace infer_native
