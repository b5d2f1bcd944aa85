// int8 convolutions for CPUs, on unsigned 8-bit images in NHWC with a border.
//
// An image is uint8 [batch, height + 2 border, width + 2 border, channels]. A byte q stands for (q - zero) * step. The
// border holds `zero`, which is the padding of the convolution that reads it. Channels are padded to `channels_of`, and
// what the padding holds has no influence. Weights are packed in panels of up to 4 blocks of 16 output channels, each
// panel being int8 [quads, blocks, 16, 4]; a quad is 4 input channels of one tap, taps row by row.
//
//   sum[o] = start[o] + sum of q * weight        exact in int32; start is -zero * the sum of the channel's weights
//   y = fma(sum, multiplier[o], offset[o]), and with a residual y = fma(residual, residual_multiplier, y)
//   int8 result: round to even of y clamped to [low, high]; float result: y, clamped the same way
//
// The result is bit-equal on every instruction set and for any number of threads.
#pragma once

#include <cstdint>

namespace infer_native {

constexpr int64_t CONV_BLOCK = 16;  // output channels
constexpr int64_t CONV_PANEL = 4;   // blocks

// Stored channels of an image with this many: a quad at least, whole blocks beyond.
inline int64_t channels_of(int64_t channels) { return channels <= 4 ? 4 : (channels + 15) / 16 * 16; }

struct Image {
  int64_t batch, height, width, channels, border;  // channels as stored

  int64_t row_bytes() const { return (width + 2 * border) * channels; }
  int64_t bytes() const { return (height + 2 * border) * row_bytes(); }  // of one sample
};

struct Window {
  int64_t kernel[2], stride[2], padding[2], dilation[2];
};

struct Conv {
  Image in, out;           // of a float result only batch, height and width of `out` count
  Window window;           // padding is at most in.border
  int64_t out_channels;    // of the weight
  const uint8_t* x;
  const int8_t* weight;
  const int32_t* start;    // these three for whole blocks
  const float* multiplier;
  const float* offset;
  float low, high;
  const uint8_t* residual;  // an image of out's size and channels with a border of its own, or null
  int64_t residual_border;
  float residual_multiplier;
  uint8_t* y;              // one of these two is set
  uint8_t fill;            // of the border of y: its zero
  float* y_float;          // [batch, height, width, out_channels]
  const float* poison;     // float result: added to each sample, NaN or 0; may be null
};

void conv2d(const Conv& conv);

// float [batch, channels, height, width] of any strides → an image; poison[sample] is NaN where a value is NaN, else 0.
void conv_quantize(const float* x, const int64_t* strides, int64_t channels, const Image& image, float step,
                   float zero, float low, uint8_t* y, float* poison);

// Largest byte of each window; what lies outside the image doesn't count. Both borders may differ; `fill` is y's.
void conv_max_pool(const uint8_t* x, const Image& in, const Window& window, uint8_t fill, const Image& out, uint8_t* y);

// codes int8 [out_channels, in_channels, kernel[0], kernel[1]] → the panels, for an image of `stored` channels, and start.
void conv_pack(const int8_t* codes, int64_t out_channels, int64_t in_channels, int64_t stored, const int64_t* kernel,
               int32_t zero, int8_t* weight, int32_t* start);

}  // namespace infer_native
