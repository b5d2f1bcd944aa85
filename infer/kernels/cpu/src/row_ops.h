// Operations on one row of floats between two layers. Sums have 16 lanes in four registers, whatever the width.
#pragma once

#include "linear/parallel_linear.h"

namespace infer_native {
namespace {

// Calls function(k, count) for each 16 columns, with count < 16 at the end.
template <class Function>
inline void each_vector(int64_t width, Function function) {
  int64_t k = 0;
  for (; k + 16 <= width; k += 16) function(k, int64_t{16});
  if (k < width) function(k, width - k);
}

inline Vector::Floats load_some(const float* x, int64_t count) { return count == 16 ? Vector::load(x) : load_tail(x, count); }

inline void store_some(float* y, int64_t count, Vector::Floats value) {
  if (count == 16) return Vector::store(y, value);
  alignas(64) float part[16];
  Vector::store(part, value);
  std::memcpy(y, part, count * sizeof(float));
}

inline Vector::Floats subtract(Vector::Floats a, Vector::Floats b) { return Vector::add(a, Vector::negate(b)); }

inline float sum_of(Vector::Floats v) {
  alignas(64) float lane[16];
  Vector::store(lane, v);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

// Returns the sum over a row of term(x); term(0) == 0 lets lanes beyond the width be padded with zeros.
template <class Term>
inline float sum_row(const float* x, int64_t width, Term term) {
  Vector::Floats total[4];
  for (auto& t : total) t = Vector::broadcast(0.0f);
  int64_t k = 0;
  for (; k + 64 <= width; k += 64)
    for (int i = 0; i < 4; ++i) total[i] = term(Vector::load(x + k + 16 * i), int64_t{16}, total[i]);
  for (; k < width; k += 16) {
    const int64_t count = width - k < 16 ? width - k : 16;
    total[0] = term(load_some(x + k, count), count, total[0]);
  }
  return sum_of(Vector::add(Vector::add(total[0], total[1]), Vector::add(total[2], total[3])));
}

void rms_norm_row(const float* x, const float* weight, float offset, float eps, int64_t width, float* y) {
  const float squares = sum_row(x, width, [](Vector::Floats v, int64_t, Vector::Floats t) { return Vector::fma(v, v, t); });
  const Vector::Floats factor = Vector::broadcast(1 / std::sqrt(squares / static_cast<float>(width) + eps));
  const Vector::Floats added = Vector::broadcast(offset);
  each_vector(width, [&](int64_t k, int64_t count) {
    Vector::Floats v = Vector::mul(load_some(x + k, count), factor);
    if (weight != nullptr) {
      Vector::Floats w = load_some(weight + k, count);
      if (offset != 0) w = Vector::add(w, added);
      v = Vector::mul(v, w);
    }
    store_some(y + k, count, v);
  });
}

void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, int64_t width, float* y) {
  const float whole = static_cast<float>(width);
  const float mean = sum_row(x, width, [](Vector::Floats v, int64_t, Vector::Floats t) { return Vector::add(v, t); }) / whole;
  const Vector::Floats middle = Vector::broadcast(mean);
  const float squares = sum_row(x, width, [&](Vector::Floats v, int64_t count, Vector::Floats t) {
    Vector::Floats d = subtract(v, middle);
    if (count < 16) {
      alignas(64) float part[16];
      Vector::store(part, d);
      d = load_tail(part, count);
    }
    return Vector::fma(d, d, t);
  });
  const Vector::Floats factor = Vector::broadcast(1 / std::sqrt(squares / whole + eps));
  each_vector(width, [&](int64_t k, int64_t count) {
    Vector::Floats v = Vector::mul(subtract(load_some(x + k, count), middle), factor);
    if (weight != nullptr) v = Vector::mul(v, load_some(weight + k, count));
    if (bias != nullptr) v = Vector::add(v, load_some(bias + k, count));
    store_some(y + k, count, v);
  });
}

// Returns e to the power of x to within 2 ulp, with x clamped to ±87 (Cephes, Moshier 1992).
inline Vector::Floats exponential(Vector::Floats x) {
  x = Vector::clamp(x, Vector::broadcast(-87.0f), Vector::broadcast(87.0f));
  const Vector::Sums n = Vector::round(Vector::mul(x, Vector::broadcast(1.44269504088896341f)));
  const Vector::Floats whole = Vector::to_float(n);
  Vector::Floats r = Vector::fnma(whole, Vector::broadcast(0.693359375f), x);
  r = Vector::fnma(whole, Vector::broadcast(-2.12194440e-4f), r);
  Vector::Floats p = Vector::broadcast(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = Vector::fma(p, r, Vector::broadcast(c));
  const Vector::Floats one = Vector::broadcast(1.0f);
  p = Vector::add(Vector::fma(p, Vector::mul(r, r), r), one);
  return Vector::mul(p, Vector::pow2(n));
}

// Returns 1 / (1 + exp(-x)).
inline Vector::Floats sigmoid(Vector::Floats x) {
  const Vector::Floats one = Vector::broadcast(1.0f);
  return Vector::div(one, Vector::add(one, exponential(Vector::negate(x))));
}

// Returns the error function to 1.5e-7 (Abramowitz and Stegun 7.1.26).
inline Vector::Floats error_function(Vector::Floats x) {
  const Vector::Floats one = Vector::broadcast(1.0f), size = Vector::max(x, Vector::negate(x));
  const Vector::Floats t = Vector::div(one, Vector::fma(size, Vector::broadcast(0.3275911f), one));
  Vector::Floats p = Vector::broadcast(1.061405429f);
  for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = Vector::fma(p, t, Vector::broadcast(c));
  const Vector::Floats tail = Vector::mul(Vector::mul(p, t), exponential(Vector::negate(Vector::mul(size, size))));
  const Vector::Floats magnitude = Vector::add(one, Vector::negate(tail));
  // The sign without a comparison; where x is too small for it, erf(x) is near 0.
  const Vector::Floats sign = Vector::clamp(Vector::mul(x, Vector::broadcast(1e30f)), Vector::broadcast(-1.0f), one);
  return Vector::mul(magnitude, sign);
}

template <int64_t KIND>
inline Vector::Floats activation(Vector::Floats x) {
  if (KIND == SILU) return Vector::mul(x, sigmoid(x));
  if (KIND == GELU_TANH) {  // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
    const Vector::Floats cube = Vector::mul(Vector::mul(x, x), x);
    const Vector::Floats u = Vector::fma(cube, Vector::broadcast(0.044715f), x);
    return Vector::mul(x, sigmoid(Vector::mul(u, Vector::broadcast(1.5957691216057308f))));
  }
  if (KIND == GELU_ERF) {
    const Vector::Floats e = error_function(Vector::mul(x, Vector::broadcast(0.70710678118654752f)));
    return Vector::mul(Vector::mul(x, Vector::broadcast(0.5f)), Vector::add(e, Vector::broadcast(1.0f)));
  }
  if (KIND == RELU) return Vector::max(Vector::broadcast(0.0f), x);
  if (KIND == SIGMOID) return sigmoid(x);
  return Vector::fma(sigmoid(Vector::add(x, x)), Vector::broadcast(2.0f), Vector::broadcast(-1.0f));
}

template <int64_t KIND>
void activate_kind(const float* x, const float* other, int64_t width, float* y) {
  each_vector(width, [&](int64_t k, int64_t count) {
    Vector::Floats v = activation<KIND>(load_some(x + k, count));
    if (other != nullptr) v = Vector::mul(v, load_some(other + k, count));
    store_some(y + k, count, v);
  });
}

void activate_row(int64_t kind, const float* x, const float* other, int64_t width, float* y) {
  switch (kind) {
    case SILU: return activate_kind<SILU>(x, other, width, y);
    case GELU_TANH: return activate_kind<GELU_TANH>(x, other, width, y);
    case GELU_ERF: return activate_kind<GELU_ERF>(x, other, width, y);
    case RELU: return activate_kind<RELU>(x, other, width, y);
    case SIGMOID: return activate_kind<SIGMOID>(x, other, width, y);
    default: return activate_kind<TANH>(x, other, width, y);
  }
}

void add_row(const float* a, const float* b, int64_t width, float* y) {
  each_vector(width, [&](int64_t k, int64_t count) {
    store_some(y + k, count, Vector::add(load_some(a + k, count), load_some(b + k, count)));
  });
}

void multiply_row(const float* a, const float* b, int64_t width, float* y) {
  each_vector(width, [&](int64_t k, int64_t count) {
    store_some(y + k, count, Vector::mul(load_some(a + k, count), load_some(b + k, count)));
  });
}

void scale_row(const float* x, float factor, int64_t width, float* y) {
  const Vector::Floats all = Vector::broadcast(factor);
  each_vector(width, [&](int64_t k, int64_t count) { store_some(y + k, count, Vector::mul(load_some(x + k, count), all)); });
}

void rotate_row(const float* x, const float* cos, const float* sin, int64_t rotated, int64_t width, float* y) {
  const int64_t half = rotated / 2;
  each_vector(half, [&](int64_t k, int64_t count) {
    const Vector::Floats a = load_some(x + k, count), b = load_some(x + half + k, count);
    const Vector::Floats first = Vector::mul(a, load_some(cos + k, count));
    const Vector::Floats second = Vector::mul(b, load_some(cos + half + k, count));
    store_some(y + k, count, Vector::fnma(b, load_some(sin + k, count), first));
    store_some(y + half + k, count, Vector::fma(a, load_some(sin + half + k, count), second));
  });
  if (x != y) std::memcpy(y + rotated, x + rotated, (width - rotated) * sizeof(float));
}

bool block_maxima(const float* x, int64_t width, float* maxima) {
  Vector::Sums max_bits = Vector::broadcast(int32_t{0});
  for (int64_t start = 0; start < width; start += MAXIMA_BLOCK, maxima += 16) {
    const int64_t end = width - start < MAXIMA_BLOCK ? width : start + MAXIMA_BLOCK;
    Vector::Floats maximum[4];
    for (auto& t : maximum) t = Vector::broadcast(-std::numeric_limits<float>::infinity());
    int64_t k = start;
    for (; k + 64 <= end; k += 64)
      for (int i = 0; i < 4; ++i) {
        const Vector::Floats v = Vector::load(x + k + 16 * i);
        maximum[i] = Vector::max(maximum[i], v);
        max_bits = Vector::max(max_bits, Vector::abs_bits(v));
      }
    for (; k + 16 <= end; k += 16) {
      const Vector::Floats v = Vector::load(x + k);
      maximum[0] = Vector::max(maximum[0], v);
      max_bits = Vector::max(max_bits, Vector::abs_bits(v));
    }
    Vector::store(maxima, Vector::max(Vector::max(maximum[0], maximum[1]), Vector::max(maximum[2], maximum[3])));
    if (k == end) continue;
    max_bits = Vector::max(max_bits, Vector::abs_bits(load_tail(x + k, end - k)));
    for (int64_t lane = 0; k + lane < end; ++lane)
      if (x[k + lane] > maxima[lane]) maxima[lane] = x[k + lane];
  }
  alignas(64) int32_t bits[16];
  Vector::store_sums(bits, max_bits);
  for (const int32_t b : bits)
    if (b > INFINITY_BITS) return false;
  return true;
}

float softmax_weights_row(const float* x, float maximum, float temperature, int64_t width, float* y) {
  const Vector::Floats largest = Vector::broadcast(maximum), divisor = Vector::broadcast(temperature);
  Vector::Floats total = Vector::broadcast(0.0f);
  each_vector(width, [&](int64_t k, int64_t count) {
    Vector::Floats v = exponential(Vector::div(subtract(load_some(x + k, count), largest), divisor));
    if (count < 16) {
      alignas(64) float part[16];
      Vector::store(part, v);
      v = load_tail(part, count);
    }
    total = Vector::add(total, v);
    if (y != nullptr) store_some(y + k, count, v);
  });
  return sum_of(total);
}

constexpr RowKernels ROWS = {rms_norm_row, layer_norm_row, activate_row, add_row, multiply_row,
                             scale_row,    rotate_row,     block_maxima,   softmax_weights_row};

}  // namespace
}  // namespace infer_native
