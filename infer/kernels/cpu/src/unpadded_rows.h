// Rows of real tokens: the sequences of a batch concatenated without padding.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace infer_native {

// Location of the real tokens of each sequence in packed rows. `pays` is false where padding is not at the end of sequences, or
// where it is too little to be worth the copies.
class PackedRows {
 public:
  // `real`: [batches, tokens], not 0 for a real token.
  template <class T>
  PackedRows(const T* real, int64_t batches, int64_t tokens) : batches_(batches), tokens_(tokens), starts_(batches + 1, 0) {
    for (int64_t b = 0; b < batches; ++b, real += tokens) {
      int64_t length = 0, count = 0;
      while (length < tokens && real[length] != 0) ++length;
      for (int64_t t = length; t < tokens; ++t) count += real[t] != 0;
      if (length == 0 || count != 0) return;
      starts_[b + 1] = starts_[b] + length;
      longest_ = length > longest_ ? length : longest_;
    }
    pays_ = rows() * MIN_PADDING <= batches * tokens * (MIN_PADDING - 1);
  }

  // Returns whether every real token attends to the real tokens of its sequence and to no padding. `mask`: bool, [batches, rows, tokens].
  bool agrees(const bool* mask, int64_t rows) const {
    std::vector<uint8_t> sees(static_cast<size_t>(tokens_));
    for (int64_t b = 0; b < batches_; ++b) {
      const int64_t length = starts_[b + 1] - starts_[b];
      std::memset(sees.data(), 0, sees.size());
      std::memset(sees.data(), 1, static_cast<size_t>(length));
      for (int64_t r = 0; r < (rows == 1 ? 1 : length); ++r)
        if (std::memcmp(mask + (b * rows + r) * tokens_, sees.data(), sees.size()) != 0) return false;
    }
    return true;
  }

  bool pays() const { return pays_; }
  int64_t rows() const { return starts_[batches_]; }
  int64_t longest() const { return longest_; }
  const int64_t* starts() const { return starts_.data(); }

  // Copies rows of `width` floats that lie `stride` apart.
  void pack(const float* from, int64_t stride, int64_t width, float* to) const {
    for (int64_t b = 0; b < batches_; ++b)
      for (int64_t t = 0; t < starts_[b + 1] - starts_[b]; ++t, to += width)
        std::memcpy(to, from + (b * tokens_ + t) * stride, static_cast<size_t>(width) * sizeof(float));
  }

  // Copies rows back, with zeros for padding.
  void unpack(const float* from, int64_t width, float* to) const {
    for (int64_t b = 0; b < batches_; ++b) {
      const int64_t real = (starts_[b + 1] - starts_[b]) * width, all = tokens_ * width;
      std::memcpy(to, from + starts_[b] * width, static_cast<size_t>(real) * sizeof(float));
      std::memset(to + real, 0, static_cast<size_t>(all - real) * sizeof(float));
      to += all;
    }
  }

 private:
  static constexpr int64_t MIN_PADDING = 16;  // pays where at least 1 / 16 of the rows is padding

  int64_t batches_, tokens_, longest_ = 0;
  std::vector<int64_t> starts_;
  bool pays_ = false;
};

}  // namespace infer_native
