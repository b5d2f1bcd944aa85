// Linear layers of many experts, of which every row asks for a few: y[i, features] = x[i / top_k] times the transpose of
// the weight of expert[i]. The packed blocks of the experts follow each other; those nobody asks for are not read.
//
// A row has the bits that the plain layer of its expert gives, whatever the other rows and the number of threads.
#pragma once

#include "linear/groupwise_weight.h"

namespace infer_native {

struct Asked {
  const int64_t* expert;  // [rows * top_k], each below `experts`
  int64_t rows, top_k, experts;
  int64_t places() const { return rows * top_k; }
};

// `weight` is that of expert 0, of `rows` output rows.
void experts_lut4(const float* x, const Asked& asked, const Lut4Weight& weight, float* y);
void experts_int8(const float* x, const Asked& asked, const Int8Weight& weight, float* y);
void experts_int8_weight(const float* x, const Asked& asked, const Int8Weight& weight, float* y);
void experts_groupwise(const float* x, const Asked& asked, const GroupwiseWeight& weight, float* y);

}  // namespace infer_native
