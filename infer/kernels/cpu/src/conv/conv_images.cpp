// Conversion of floats to images, max pooling, and packing of convolution weights into panels.
#include <algorithm>
#include <cstring>
#include <vector>

#include "conv/conv_loop.h"

namespace infer_native {
namespace {

constexpr int64_t STRIP = 64;  // pixels of a channel that are quantized before they are spread

// Converts one row of pixels; channels are `channel` floats apart, pixels `pixel` floats.
bool quantize_line(const ConvKernels& kernels, const float* x, int64_t pixel, int64_t channel, int64_t channels,
                   const Image& image, const Grid& grid, uint8_t* y) {
  bool bad = false;
  if (channel == 1) {
    for (int64_t i = 0; i < image.width; ++i)
      bad |= kernels.quantize_row(x + i * pixel, channels, grid, y + i * image.channels);
    return bad;
  }
  float gathered[STRIP];
  uint8_t bytes[STRIP];
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t i = 0; i < image.width; i += STRIP) {
      const int64_t count = std::min(image.width - i, STRIP);
      const float* from = x + c * channel + i * pixel;
      if (pixel != 1) {
        for (int64_t k = 0; k < count; ++k) gathered[k] = from[k * pixel];
        from = gathered;
      }
      bad |= kernels.quantize_row(from, count, grid, bytes);
      for (int64_t k = 0; k < count; ++k) y[(i + k) * image.channels + c] = bytes[k];
    }
  return bad;
}

}  // namespace

void conv_fill_border(const Image& image, uint8_t value, uint8_t* y) {
  if (image.border == 0) return;
  const int64_t row = image.row_bytes(), edge = image.border * image.channels;
  std::memset(y, value, image.border * row);
  for (int64_t i = 0; i < image.height; ++i) {
    uint8_t* line = y + (image.border + i) * row;
    std::memset(line, value, edge);
    std::memset(line + row - edge, value, edge);
  }
  std::memset(y + (image.border + image.height) * row, value, image.border * row);
}

void conv_quantize(const float* x, const int64_t* strides, int64_t channels, const Image& image, float step,
                   float zero, float low, uint8_t* y, float* poison) {
  const ConvKernels& kernels = conv_kernels(0);
  const Grid grid{step, zero, low};
  std::vector<uint8_t> bad(static_cast<size_t>(image.batch * image.height));
#pragma omp parallel for if (image.batch * image.bytes() > 16384)
  for (int64_t i = 0; i < image.batch * image.height; ++i) {
    const int64_t sample = i / image.height, row = i % image.height;
    uint8_t* line = y + sample * image.bytes() + (image.border + row) * image.row_bytes() + image.border * image.channels;
    if (image.channels != channels) std::memset(line, 0, image.width * image.channels);
    bad[i] = quantize_line(kernels, x + sample * strides[0] + row * strides[2], strides[3], strides[1], channels, image,
                           grid, line);
  }
  for (int64_t sample = 0; sample < image.batch; ++sample) {
    conv_fill_border(image, static_cast<uint8_t>(zero), y + sample * image.bytes());
    const auto first = bad.begin() + sample * image.height;
    const bool any = std::any_of(first, first + image.height, [](uint8_t each) { return each != 0; });
    poison[sample] = any ? __builtin_nanf("") : 0.0f;
  }
}

void conv_max_pool(const uint8_t* x, const Image& in, const Window& window, uint8_t fill, const Image& out, uint8_t* y) {
  const ConvKernels& kernels = conv_kernels(0);
#pragma omp parallel for if (out.batch * out.bytes() > 16384)
  for (int64_t i = 0; i < out.batch * out.height; ++i) {
    const int64_t sample = i / out.height, row = i % out.height;
    uint8_t* line = y + sample * out.bytes() + (out.border + row) * out.row_bytes() + out.border * out.channels;
    std::memset(line, 0, out.width * out.channels);
    for (int64_t u = 0; u < window.kernel[0]; ++u) {
      const int64_t from = row * window.stride[0] - window.padding[0] + u * window.dilation[0];
      if (from < 0 || from >= in.height) continue;
      const uint8_t* source = x + sample * in.bytes() + (in.border + from) * in.row_bytes() + in.border * in.channels;
      for (int64_t column = 0; column < out.width; ++column)
        for (int64_t v = 0; v < window.kernel[1]; ++v) {
          const int64_t at = column * window.stride[1] - window.padding[1] + v * window.dilation[1];
          if (at >= 0 && at < in.width)
            kernels.max_row(source + at * in.channels, in.channels, line + column * out.channels);
        }
    }
  }
  for (int64_t sample = 0; sample < out.batch; ++sample) conv_fill_border(out, fill, y + sample * out.bytes());
}

void conv_pack(const int8_t* codes, int64_t out_channels, int64_t in_channels, int64_t stored, const int64_t* kernel,
               int32_t zero, int8_t* weight, int32_t* start) {
  const int64_t blocks = (out_channels + CONV_BLOCK - 1) / CONV_BLOCK, taps = kernel[0] * kernel[1];
  const int64_t quads = conv_quads(stored, kernel);
  std::memset(weight, 0, blocks * quads * 64);
  std::memset(start, 0, blocks * CONV_BLOCK * sizeof(int32_t));
  for (int64_t o = 0; o < out_channels; ++o) {
    const int64_t block = o / CONV_BLOCK, panel = block / CONV_PANEL * CONV_PANEL;
    const int64_t count = std::min(blocks - panel, CONV_PANEL);
    int8_t* to = weight + panel * quads * 64 + (block - panel) * 64 + o % CONV_BLOCK * 4;
    const int8_t* from = codes + o * in_channels * taps;
    for (int64_t c = 0; c < in_channels; ++c)
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int8_t code = from[c * taps + tap];
        const int64_t k = tap * stored + c;
        to[k / 4 * count * 64 + k % 4] = code;
        start[o] -= zero * code;
      }
  }
}

}  // namespace infer_native
