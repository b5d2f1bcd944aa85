// A fused program: a run of layers in one parallel region. Norms, linear layers, activations and sums are encoded as a
// small program of integers.
//
// A value is float [rows, width]; there are two counts of rows, that of the tokens (domain 0) and that of the tokens
// that GATHER picks (domain 1). Values lie in slots of one buffer, which the calling thread keeps.
// With one token every thread computes all row operations into its own slots, and threads synchronize only around
// linear layers; with more, rows are divided among threads.
//
//   program = domain of the result, its width, number of slots, (kind, domain, width) of each slot, then operations:
//             an OpCode, then the fields of its struct below
#pragma once

#include <cstdint>

#include "attend/attend_encoder.h"

namespace infer_native {

enum SlotKind : int64_t { ROW_SLOT, TEAM_SLOT, RESULT_SLOT };

enum OpCode : int64_t {
  END,
  LINEAR,
  RMS_NORM,
  LAYER_NORM,
  ACTIVATE,
  ADD,
  MULTIPLY,
  SCALE,
  ROTATE,
  GATHER,
  COPY,
  ATTEND,
  ATTEND_ALL,
  ATTEND_OTHER,
};

// Fields of the operations, in the order of the program. Operands and numbers are indices; an operand of -1 is absent.

struct Place {
  int64_t slot;    // or -1 - operand
  int64_t offset;  // floats
  int64_t stride;  // floats between rows
};

struct HeadsPlace {
  Place rows;
  int64_t head_stride;  // floats between heads
};

struct LinearOp {
  int64_t kind;
  Place x, y;
  int64_t features, columns;
  int64_t weight[4];  // operands: LUT4 codes, scale, table, row_scale; GROUPWISE the first three; INT8 codes, scale, sums, step or multiplier of x
  int64_t bias;
};

struct RmsNormOp {
  Place x, y;
  int64_t heads, head_stride, width, weight;
  int64_t offset, eps;  // numbers
};

struct LayerNormOp {
  Place x, y;
  int64_t width, weight, bias;
  int64_t eps;  // number
};

struct ActivateOp {
  int64_t activation;
  Place x, other, y;  // other: a stride of -1 for none
  int64_t width;
};

// ADD and MULTIPLY.
struct CombineOp {
  Place x, other, y;
  int64_t width;
};

struct ScaleOp {
  Place x, y;
  int64_t width;
  int64_t factor;  // number
};

struct RotateOp {
  Place x, y;
  int64_t heads, head_stride, head_width, rotated;
  Place cos, sin;
};

struct GatherOp {
  Place x, y;
  int64_t width, rows;
};

struct CopyOp {
  Place x, y;
  int64_t heads, head_stride, head_width;
};

struct AttendOp {
  HeadsPlace query, key, value;
  int64_t y_slot;
  int64_t query_heads, kv_heads, head_dim, layer, sinks, window;
  int64_t scale, softcap;  // numbers
};

// ATTEND over pages of its own, such as those of a source: operands that stand in for what the header names.
struct AttendOtherOp {
  AttendOp attend;
  int64_t slots, table, starts, lengths;
};

struct AttendAllOp {
  HeadsPlace query, key, value;
  Place y;
  int64_t query_heads, kv_heads, head_dim;
  int64_t mask, mask_is_float, mask_has_batches, mask_has_rows, causal;
  int64_t scale;  // number
};

// The operation at `op`, which points to its code. All fields are int64_t, so the program is read as it is.
template <class Op>
const Op& fields(const int64_t* op) {
  return *reinterpret_cast<const Op*>(op + 1);
}

// A kind from GROUPWISE on is GROUPWISE + layout, see groupwise_weight.h.
enum LinearKind : int64_t { LUT4, INT8, INT8_WEIGHT, INT8_BALANCED, LUT4_FINE, GROUPWISE = int64_t{1} << 56 };

inline bool is_groupwise(int64_t kind) { return kind >= GROUPWISE; }
inline int64_t layout_of(int64_t kind) { return kind - GROUPWISE; }

struct ProgramCall {
  const int64_t* program;
  const double* numbers;
  void* const* operands;
  const int64_t* strides;  // of each operand: floats between its rows where they are columns of a wider tensor, else 0
  int64_t rows[2];  // of each domain
  float* result;
  AttendArgs attention{};  // what all layers share; the pages are those of layer 0
  int64_t layer_bytes = 0;
  const int64_t* numel = nullptr;  // of each operand that is no weight
  int64_t tokens = 0;  // of each sequence, where the rows are those of several
  // Where those sequences are packed: sequence `b` is the rows starts[b] to starts[b + 1], and `tokens` the longest.
  const int64_t* starts = nullptr;
  int64_t sequences = 0;
  // Of a call on some rows of a larger one: the first of them, which operands and mask count from; `result` is its own.
  int64_t first_row = 0, first_sequence = 0;
};

// Length of an operation in a program, its code included; 0 for an unknown code.
int64_t op_length(int64_t code);

// Calls function(const AttendOp&, const AttendOtherOp*) for each ATTEND and ATTEND_OTHER of a program; the second is null
// for the former.
template <class Function>
void each_attention(const int64_t* program, Function function) {
  for (const int64_t* op = program + 3 + 3 * program[2]; *op != END; op += op_length(*op))
    if (*op == ATTEND) function(fields<AttendOp>(op), static_cast<const AttendOtherOp*>(nullptr));
    else if (*op == ATTEND_OTHER) function(fields<AttendOtherOp>(op).attend, &fields<AttendOtherOp>(op));
}

void run_program(const ProgramCall& call);

}  // namespace infer_native
