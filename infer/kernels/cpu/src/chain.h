// A run of layers in one region of threads: norms, linear layers, activations and sums, as a small program of integers.
//
// A value is float [rows, width]; there are two counts of rows, that of the tokens (domain 0) and that of the tokens
// that are picked by GATHER (domain 1). Values lie in slots of one buffer, which the caller's thread keeps.
// With one token every thread computes all row work for itself into slots of its own, and the threads meet only around
// linear layers; with more, rows are shared out.
//
//   program = domain of the result, its width, number of slots, (kind, domain, width) of each, then operations:
//             code, then its arguments
//   place   = slot or -1 - operand, offset in floats, floats between rows
#pragma once

#include <cstdint>

#include "attend_all.h"

namespace infer_native {

enum SlotKind : int64_t { ROW_SLOT, TEAM_SLOT, RESULT_SLOT };

enum ChainCode : int64_t {
  END,
  LINEAR,      // kind, x, y, rows, columns, four operands of the weight, operand of the bias; -1: none
  RMS_NORM,    // x, y, heads, stride of the heads of x, width, operand of the weight or -1, numbers of offset and eps
  LAYER_NORM,  // x, y, width, operands of weight and bias or -1, number of eps
  ACTIVATE,    // activation, x, other or a place of operand 0 … with stride -1 for none, y, width
  ADD,         // a, b, y, width
  MULTIPLY,    // the same
  SCALE,       // x, y, width, number of the factor
  ROTATE,      // x, y, heads, stride of the heads of x, width of a head, rotated, cos, sin
  GATHER,      // x, y, width, operand of the rows
  COPY,        // x, y, heads, stride of the heads of x, width of a head
  ATTEND,      // query, its stride of heads, key, the same, value, the same, y slot, query heads, KV heads, width of a
               // head, layer, operand of the sinks or -1, window, numbers of scale and softcap
  ATTEND_ALL,  // query, its stride of heads, key, the same, value, the same, y, query heads, KV heads, width of a head,
               // operand of the mask or -1, whether it is float, has batches, has rows, causal, number of the scale
};

enum LinearKind : int64_t { LUT4, INT8, INT8_WEIGHT, INT8_BALANCED, LUT4_FINE };

struct ChainCall {
  const int64_t* program;
  const double* numbers;
  void* const* operands;
  const int64_t* strides;  // of each operand: floats between its rows where they are columns of a wider tensor, else 0
  int64_t rows[2];  // of each domain
  float* result;
  AttendArgs attention{};  // what all layers share; the pages are those of layer 0
  int64_t layer_bytes = 0;
  int64_t tokens = 0;  // of each sequence, where the rows are those of several
};

// Of an operation in a program, its code included; 0: there is no such code.
int64_t chain_length(int64_t code);

// function(arguments of the operation) for each ATTEND of a program.
template <class Function>
void each_attention(const int64_t* program, Function function) {
  for (const int64_t* op = program + 3 + 3 * program[2]; *op != END; op += chain_length(*op))
    if (*op == ATTEND) function(op + 1);
}

void run_chain(const ChainCall& call);

}  // namespace infer_native
