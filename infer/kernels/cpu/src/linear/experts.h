// Linear layers of a mixture of experts: y[i, features] = x[i / top_k] times the transpose of the weight of expert[i]. The
// packed blocks of the experts are consecutive; those of experts without rows are not read.
//
// A row is bit-equal to the result of its expert's linear layer, whatever the other rows and the number of threads.
#pragma once

#include "linear/groupwise_weight.h"

namespace infer_native {

// The experts of each row.
struct ExpertRouting {
  const int64_t* expert;  // [rows * top_k], each below `experts`
  int64_t rows, top_k, experts;
  int64_t assignments() const { return rows * top_k; }
};

// `weight` describes expert 0, of `weight.rows` output rows; those of the others follow it.
void experts_lut4(const float* x, const ExpertRouting& routing, const Lut4Weight& weight, float* y);
void experts_int8(const float* x, const ExpertRouting& routing, const Int8Weight& weight, float* y);
void experts_int8_weight(const float* x, const ExpertRouting& routing, const Int8Weight& weight, float* y);
void experts_groupwise(const float* x, const ExpertRouting& routing, const GroupwiseWeight& weight, float* y);

}  // namespace infer_native
