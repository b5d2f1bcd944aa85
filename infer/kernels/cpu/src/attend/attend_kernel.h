// Interface of the attention kernels of each instruction set: pieces of work of one KV head, scheduled by attend.cpp.
#pragma once

#include "attend/attend.h"
#include "attend/attend_encoder.h"
#include "instruction_set.h"

namespace infer_native {

constexpr int64_t KEY_GROUP = 16;  // tokens whose keys lie together
constexpr int64_t CHUNK = 256;     // tokens that decoding sums on their own before they are merged
constexpr int64_t FEW_ROWS = 16;   // queries times heads of a KV head, up to which a sequence takes the decoding path

struct Piece {
  int64_t sequence, head;  // a KV head
  int64_t begin, end;      // chunks of the decoding path, or new tokens of the sequence
};

// Tokens of a sequence in this step.
struct Span {
  int64_t first, count, length;  // its first row in `query`, new tokens, tokens in the cache
  int64_t low, high;             // places in the cache that any of its queries sees

  Span(const AttendArgs& args, int64_t sequence)
      : first(args.query_start[sequence]), count(args.query_start[sequence + 1] - first), length(args.seq_lens[sequence]) {
    high = length > 0 ? length : 0;
    low = first_seen(args, length - count);
    if (low > high) low = high;
  }
  int64_t position(int64_t token) const { return length - count + token; }  // of a new token
  int64_t first_chunk() const { return low / CHUNK; }
  int64_t chunks() const { return (high + CHUNK - 1) / CHUNK - first_chunk(); }
};

inline int64_t group_size(const AttendArgs& args) { return args.query_heads / args.kv_heads; }
inline int64_t padded_dim(const AttendArgs& args) { return (args.head_dim + 15) / 16 * 16; }

// Partial softmax of one chunk and KV head: largest logit and sum of exponentials of each row, then the weighted values.
inline int64_t partial_floats(const AttendArgs& args, int64_t rows) { return rows * (2 + padded_dim(args)); }

struct AttendKernel {
  // Whether few rows take the decoding path on this instruction set.
  bool (*decodes)(const AttendArgs& args);
  // Put the keys and values of `begin <= token * kv_heads + head < end` into the cache.
  void (*write)(const AttendArgs& args, int64_t begin, int64_t end);
  // Chunks begin..end of a sequence with few rows; into `partials`, one after the other, or to `out` when that is null.
  void (*decode)(const AttendArgs& args, const Piece& piece, float* partials);
  // Merges the partials of a sequence and head into out.
  void (*merge)(const AttendArgs& args, const Piece& piece, const float* partials);
  // New tokens begin..end of a sequence against all they see → out.
  void (*tile)(const AttendArgs& args, const Piece& piece);
  int64_t tile_rows;
  // Queries begin..end of a head of a sequence, without a cache.
  void (*all)(const AttendAllArgs& args, int64_t batch, int64_t head, int64_t begin, int64_t end);
};

INFER_OF_SET const AttendKernel ATTEND_AVX512_VNNI;
// The `tile` of AMX: queries of bfloat16 on tile registers, others as AVX-512 computes them.
INFER_OF_SET void attend_tile_amx(const AttendArgs& args, const Piece& piece);
// The same with the products of AVX-512 BF16.
INFER_OF_SET void attend_tile_avx512_bf16(const AttendArgs& args, const Piece& piece);
INFER_OF_SET const AttendKernel ATTEND_AVX2;
INFER_OF_SET const AttendKernel ATTEND_NEON_DOTPROD;
INFER_OF_SET const AttendKernel ATTEND_SCALAR;

// Memory of the calling thread for one piece of work, at a multiple of 64; contents do not survive.
void* attend_workspace(int64_t bytes);

}  // namespace infer_native
