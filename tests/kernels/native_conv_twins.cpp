// Convolutions, pooling and quantized images of every instruction set of the CPU (or of the emulator) against plain C++:
// prints what differs, exits 1 when anything does.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "conv/conv.h"
#include "linear/linear.h"

using namespace infer_native;

namespace {

float number() { return static_cast<float>(std::rand() % 20001 - 10000) / 777; }

struct Case {
  Window window;
  int64_t batch, channels, features, zero;
  bool residual;
};

// The bytes of a quantized image, of a convolution of it, of its largest values, and the floats of a convolution.
struct Results {
  std::vector<uint8_t> image, bytes, largest;
  std::vector<float> floats;
};

Image image_of(int64_t batch, int64_t height, int64_t width, int64_t channels, int64_t border) {
  return {batch, height, width, channels_of(channels), border};
}

int64_t reached(int64_t size, const Window& w, int axis) {
  return (size + 2 * w.padding[axis] - w.dilation[axis] * (w.kernel[axis] - 1) - 1) / w.stride[axis] + 1;
}

Results run(const Case& given) {
  std::srand(11);
  const Window& w = given.window;
  // Rows of more than 32 pixels whose channels are whole cache lines are read where they are.
  const int64_t height = 9, width = given.channels == 64 ? 37 : 13, border = std::max(w.padding[0], w.padding[1]) + 1;
  const Image in = image_of(given.batch, height, width, given.channels, border);
  const int64_t blocks = (given.features + CONV_BLOCK - 1) / CONV_BLOCK, taps = w.kernel[0] * w.kernel[1];
  const Image out{given.batch, reached(height, w, 0), reached(width, w, 1), blocks * CONV_BLOCK, 1};
  std::vector<float> x(given.batch * given.channels * height * width);
  for (float& v : x) v = number();
  if (given.batch > 1) x[x.size() - 1] = NAN;
  const int64_t strides[4] = {given.channels * height * width, height * width, width, 1};

  Results found;
  std::vector<float> poison(given.batch);
  found.image.assign(given.batch * in.bytes(), 77);
  const float zero = static_cast<float>(given.zero), low = given.zero != 0 ? 1.0f : 0.0f;
  conv_quantize(x.data(), strides, given.channels, in, 0.1f, zero, low, found.image.data(), poison.data());

  std::vector<int8_t> codes(given.features * given.channels * taps), weight(blocks * taps * in.channels * 16);
  for (int8_t& v : codes) v = static_cast<int8_t>(std::rand() % 255 - 127);
  std::vector<int32_t> start(blocks * 16);
  conv_pack(codes.data(), given.features, given.channels, in.channels, w.kernel, static_cast<int32_t>(given.zero), weight.data(),
            start.data());
  std::vector<float> multiplier(blocks * 16), offset(blocks * 16);
  for (float& v : multiplier) v = number() / 20000;
  for (float& v : offset) v = 90 + number();
  std::vector<uint8_t> residual(given.batch * out.bytes());
  for (uint8_t& v : residual) v = static_cast<uint8_t>(std::rand());

  Conv conv{in,           out,   w,     given.features, found.image.data(), weight.data(), start.data(), multiplier.data(),
            offset.data(), 40.0f, 255.0f, nullptr,      1,                  0.25f,         nullptr,      3,
            nullptr,       nullptr};
  if (given.residual) conv.residual = residual.data();
  found.bytes.assign(given.batch * out.bytes(), 77);
  conv.y = found.bytes.data();
  conv2d(conv);
  conv.y = nullptr;
  conv.low = -1e30f, conv.high = 1e30f;
  found.floats.assign(given.batch * out.height * out.width * given.features, 77.0f);
  conv.y_float = found.floats.data(), conv.poison = poison.data();
  conv2d(conv);

  const Image pooled = image_of(given.batch, reached(height, w, 0), reached(width, w, 1), given.channels, 2);
  found.largest.assign(given.batch * pooled.bytes(), 77);
  conv_max_pool(found.image.data(), in, w, 5, pooled, found.largest.data());
  return found;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  return a.size() == b.size();
}

}  // namespace

int main() {
  const Window windows[] = {{{1, 1}, {1, 1}, {0, 0}, {1, 1}},
                            {{3, 3}, {1, 1}, {1, 1}, {1, 1}},
                            {{3, 5}, {2, 1}, {1, 2}, {1, 1}},
                            {{3, 3}, {2, 2}, {2, 2}, {2, 2}},
                            {{7, 7}, {2, 2}, {3, 3}, {1, 1}}};
  int differing = 0, compared = 0;
  for (const Window& window : windows)
    for (const int64_t channels : {1, 3, 17, 64})
      for (const int64_t features : {1, 16, 33, 64, 70}) {
        const Case given{window, channels % 2 + 1, channels, features, features % 2 ? 128 : 0, features > 16};
        infer_set_isa("scalar");
        const Results wanted = run(given);
        std::istringstream names(infer_isas());
        for (std::string name; std::getline(names, name, ',');) {
          if (name == "scalar") continue;
          infer_set_isa(name.c_str());
          const Results got = run(given);
          const bool equal[] = {wanted.image == got.image, wanted.bytes == got.bytes, wanted.largest == got.largest,
                                same(wanted.floats, got.floats)};
          const char* const part[] = {"image", "bytes", "largest", "floats"};
          for (int i = 0; i < 4; ++i)
            if (++compared && !equal[i] && ++differing)
              std::printf("%s, %ld to %ld channels, window %ldx%ld: other %s\n", name.c_str(), static_cast<long>(channels),
                          static_cast<long>(features), static_cast<long>(window.kernel[0]),
                          static_cast<long>(window.kernel[1]), part[i]);
        }
      }
  std::printf("%d compared\n", compared);
  std::printf("checked %s\n", infer_isas());
  return differing != 0 || std::string(infer_isas()) == "scalar";
}
