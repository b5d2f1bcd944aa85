// Pieces of the rows of a fused program that need nothing of each other: each thread runs the whole program on one piece
// after another, without a barrier, so that a preempted thread delays nobody and the activations of a piece stay in cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fused_program/fused_program.h"

namespace infer_native {
namespace {

// One call of a program on some of the rows of another call.
struct RowPiece {
  int64_t first_sequence, sequences, first_row, rows, longest;
};

class RowPieces {
 public:
  // Divides the rows for `threads` threads. Sequences stay whole; without attention a sequence is a row.
  RowPieces(const ProgramCall& call, int64_t threads) : call_(call) {
    if (!independent_rows(call.program)) return;
    const int64_t sequences = attends_ ? (call.starts != nullptr ? call.sequences : call.rows[0] / call.tokens) : call.rows[0];
    if (sequences < threads || call.rows[0] < threads * LEAST_ROWS) return;
    const int64_t most = threads == 1 ? 1 : std::min(call.rows[0] / (threads * LEAST_ROWS), PIECES_PER_THREAD);
    divide(sequences, threads * std::max(most, (call.rows[0] - 1) / (threads * MOST_ROWS) + 1));
    // The longest first, so that threads end at about one time.
    std::stable_sort(pieces_.begin(), pieces_.end(), [](const RowPiece& a, const RowPiece& b) { return a.rows > b.rows; });
    balanced_ = TOLERANCE * longest_thread(threads) * threads <= (TOLERANCE + 1) * call.rows[0];
  }

  // Returns whether there are several, and threads that take them end at about one time: else the whole team is faster.
  bool pay() const { return count() > 1 && balanced_; }
  int64_t count() const { return static_cast<int64_t>(pieces_.size()); }

  // Returns the call of one piece; `starts` is memory that it points to.
  ProgramCall call_of(int64_t index, std::vector<int64_t>& starts) const {
    const RowPiece& piece = pieces_[index];
    ProgramCall part = call_;
    part.rows[0] = piece.rows;
    part.first_row = piece.first_row, part.first_sequence = piece.first_sequence;
    part.result += piece.first_row * call_.program[1];
    if (call_.starts != nullptr) {
      starts.resize(static_cast<size_t>(piece.sequences) + 1);
      for (int64_t i = 0; i <= piece.sequences; ++i) starts[i] = call_.starts[piece.first_sequence + i] - piece.first_row;
      part.starts = starts.data(), part.sequences = piece.sequences, part.tokens = piece.longest;
    }
    return part;
  }

 private:
  // A piece reads all weights, which with fewer rows costs more than barriers; with more, activations leave the cache.
  static constexpr int64_t LEAST_ROWS = 64, MOST_ROWS = 256, PIECES_PER_THREAD = 4;
  static constexpr int64_t TOLERANCE = 8;  // the busiest thread may have an eighth more than its share

  // Ends piece `i` of `count` at the first sequence that reaches its share of all rows.
  void divide(int64_t sequences, int64_t count) {
    for (int64_t sequence = 0, i = 1; sequence < sequences; ++i) {
      RowPiece piece{sequence, 0, first_row(sequence), 0, 0};
      while (sequence < sequences && first_row(sequence) * count < call_.rows[0] * i) {
        const int64_t length = first_row(sequence + 1) - first_row(sequence);
        piece.longest = std::max(piece.longest, length);
        ++sequence;
      }
      piece.sequences = sequence - piece.first_sequence;
      piece.rows = first_row(sequence) - piece.first_row;
      if (piece.sequences > 0) pieces_.push_back(piece);
    }
  }

  // Returns the rows of the busiest of `threads` threads that take the pieces in order.
  int64_t longest_thread(int64_t threads) const {
    std::vector<int64_t> rows(static_cast<size_t>(threads), 0);
    for (const RowPiece& piece : pieces_) *std::min_element(rows.begin(), rows.end()) += piece.rows;
    return *std::max_element(rows.begin(), rows.end());
  }

  int64_t first_row(int64_t sequence) const {
    return !attends_ ? sequence : call_.starts != nullptr ? call_.starts[sequence] : sequence * call_.tokens;
  }

  // Returns whether rows, or whole sequences, are computed without the others. Gathered rows and pages of a cache are not.
  bool independent_rows(const int64_t* program) {
    for (const int64_t* op = program + 3 + 3 * program[2]; *op != END; op += op_length(*op)) {
      if (*op == GATHER || *op == ATTEND || *op == ATTEND_OTHER) return false;
      attends_ |= *op == ATTEND_ALL;
    }
    return true;
  }

  const ProgramCall& call_;
  bool attends_ = false, balanced_ = false;
  std::vector<RowPiece> pieces_;
};

}  // namespace
}  // namespace infer_native
