// Binds the convolutions to torch. `window` is kernel, stride, padding and dilation, two numbers each; `borders` are those
// of the input, the residual and the result.
#include <tuple>
#include <vector>

#include "conv/conv_loop.h"
#include "torch_bindings/torch_view.h"

using namespace infer_native;

namespace {

struct Sizes {
  const int64_t* window;
  const int64_t* borders;
};

AtenTensorHandle new_image(const Image& image) {
  const int64_t sizes[4] = {image.batch, image.height + 2 * image.border, image.width + 2 * image.border, image.channels};
  const int64_t strides[4] = {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, sizes, strides, aoti_torch_dtype_uint8(),
                                                         aoti_torch_device_type_cpu(), 0, &made));
  return made;
}

Image image_of(const View& x, int64_t border, const char* name) {
  STD_TORCH_CHECK(x.dtype == aoti_torch_dtype_uint8() && x.dim == 4 && x.contiguous(), "expected ", name,
                  " as a uint8 image [batch, height, width, channels]");
  return {x.sizes[0], x.sizes[1] - 2 * border, x.sizes[2] - 2 * border, x.sizes[3], border};
}

Window window_of(const int64_t* w) { return {{w[0], w[1]}, {w[2], w[3]}, {w[4], w[5]}, {w[6], w[7]}}; }

Image result_of(const Image& in, const Window& w, int64_t channels, int64_t border) {
  int64_t sizes[2] = {in.height, in.width};
  for (int i = 0; i < 2; ++i) {
    sizes[i] = (sizes[i] + 2 * w.padding[i] - w.dilation[i] * (w.kernel[i] - 1) - 1) / w.stride[i] + 1;
    STD_TORCH_CHECK(sizes[i] > 0, "the window is larger than the image and its padding");
  }
  return {in.batch, sizes[0], sizes[1], channels, border};
}

template <typename T>
const T* operand(const View& view, int32_t dtype, int64_t count, const char* name) {
  STD_TORCH_CHECK(view.dtype == dtype && view.numel == count && view.contiguous(), "expected ", name, " with ", count,
                  " numbers, got ", view.numel);
  return view.as<const T>();
}

Conv convolution(const View& x, const View& weight, const View& start, const View& multiplier, const View& offset,
                 const std::optional<View>& residual, double residual_multiplier, double low, double high,
                 int64_t out_channels, const Sizes& sizes) {
  Conv conv{};
  conv.in = image_of(x, sizes.borders[0], "x");
  conv.window = window_of(sizes.window);
  const int64_t blocks = (out_channels + CONV_BLOCK - 1) / CONV_BLOCK, rows = blocks * CONV_BLOCK;
  const int64_t most = std::max(conv.window.padding[0], conv.window.padding[1]);
  STD_TORCH_CHECK(most <= conv.in.border, "expected a border of ", most, " or more, got ", conv.in.border);
  STD_TORCH_CHECK(conv.window.kernel[0] * conv.window.kernel[1] <= MAX_RUNS, "expected at most ", MAX_RUNS, " taps");
  conv.out = result_of(conv.in, conv.window, rows, sizes.borders[2]);
  conv.out_channels = out_channels;
  conv.x = x.as<const uint8_t>();
  const int64_t quads = conv_quads(conv.in.channels, conv.window.kernel);
  conv.weight = operand<int8_t>(weight, aoti_torch_dtype_int8(), blocks * quads * 64, "weight");
  conv.start = operand<int32_t>(start, aoti_torch_dtype_int32(), rows, "start");
  conv.multiplier = operand<float>(multiplier, aoti_torch_dtype_float32(), rows, "multiplier");
  conv.offset = operand<float>(offset, aoti_torch_dtype_float32(), rows, "offset");
  conv.low = static_cast<float>(low), conv.high = static_cast<float>(high);
  if (residual) {
    const Image other = image_of(*residual, sizes.borders[1], "residual");
    STD_TORCH_CHECK(other.batch == conv.out.batch && other.height == conv.out.height && other.width == conv.out.width &&
                        other.channels == rows,
                    "the residual is of another size than the result");
    conv.residual = residual->as<const uint8_t>(), conv.residual_border = sizes.borders[1];
    conv.residual_multiplier = static_cast<float>(residual_multiplier);
  }
  return conv;
}

AtenTensorHandle to_image(Conv conv, int64_t fill) {
  const AtenTensorHandle made = new_image(conv.out);
  conv.y = View(made).as<uint8_t>(), conv.fill = static_cast<uint8_t>(fill);
  conv2d(conv);
  return made;
}

AtenTensorHandle to_floats(Conv conv, const View& poison) {
  const int64_t sizes[4] = {conv.out.batch, conv.out.height, conv.out.width, conv.out_channels};
  conv.poison = operand<float>(poison, aoti_torch_dtype_float32(), conv.out.batch, "poison");
  const AtenTensorHandle made = new_floats(sizes, 4);
  conv.y_float = View(made).as<float>();
  conv2d(conv);
  return made;
}

std::pair<AtenTensorHandle, AtenTensorHandle> image(const View& x, double step, int64_t zero, int64_t low,
                                                    int64_t border, int64_t channels) {
  STD_TORCH_CHECK(x.dim == 4 && x.dtype == aoti_torch_dtype_float32() && x.sizes[1] <= channels,
                  "expected x float32 [batch, channels, height, width] of at most ", channels, " channels");
  const Image made{x.sizes[0], x.sizes[2], x.sizes[3], channels, border};
  int64_t* strides;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x.handle, &strides));
  const AtenTensorHandle y = new_image(made), poison = new_floats(&made.batch, 1);
  conv_quantize(x.as<const float>(), strides, x.sizes[1], made, static_cast<float>(step), static_cast<float>(zero),
                static_cast<float>(low), View(y).as<uint8_t>(), View(poison).as<float>());
  return {y, poison};
}

AtenTensorHandle max_pool(const View& x, const Sizes& sizes, int64_t fill) {
  const Image in = image_of(x, sizes.borders[0], "x");
  const Window window = window_of(sizes.window);
  const Image out = result_of(in, window, in.channels, sizes.borders[2]);
  const AtenTensorHandle made = new_image(out);
  conv_max_pool(x.as<const uint8_t>(), in, window, static_cast<uint8_t>(fill), out, View(made).as<uint8_t>());
  return made;
}

Sizes sizes_of(const std::vector<int64_t>& window, const std::vector<int64_t>& borders) {
  STD_TORCH_CHECK(window.size() == 8 && borders.size() == 3, "expected 8 numbers of a window and 3 borders");
  return {window.data(), borders.data()};
}

std::tuple<Tensor, Tensor> op_image(Tensor x, double step, int64_t zero, int64_t low, int64_t border, int64_t channels) {
  const auto [y, poison] = image(View(x.get()), step, zero, low, border, channels);
  return {Tensor(y), Tensor(poison)};
}

Tensor op_packed(Tensor x, Tensor weight, Tensor start, Tensor multiplier, Tensor offset, std::optional<Tensor> residual,
                 double residual_multiplier, double low, double high, int64_t out_channels, std::vector<int64_t> window,
                 std::vector<int64_t> borders, int64_t fill) {
  return Tensor(to_image(
      convolution(View(x.get()), View(weight.get()), View(start.get()), View(multiplier.get()), View(offset.get()),
                  optional_view(residual), residual_multiplier, low, high, out_channels, sizes_of(window, borders)),
      fill));
}

Tensor op_packed_float(Tensor x, Tensor weight, Tensor start, Tensor multiplier, Tensor offset,
                       std::optional<Tensor> residual, double residual_multiplier, double low, double high,
                       int64_t out_channels, std::vector<int64_t> window, std::vector<int64_t> borders, Tensor poison) {
  return Tensor(to_floats(
      convolution(View(x.get()), View(weight.get()), View(start.get()), View(multiplier.get()), View(offset.get()),
                  optional_view(residual), residual_multiplier, low, high, out_channels, sizes_of(window, borders)),
      View(poison.get())));
}

Tensor op_max_pool(Tensor x, std::vector<int64_t> window, std::vector<int64_t> borders, int64_t fill) {
  return Tensor(max_pool(View(x.get()), sizes_of(window, borders), fill));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infer, CPU, m) {
  m.impl("conv2d_int8_image", TORCH_BOX(&op_image));
  m.impl("conv2d_int8_packed", TORCH_BOX(&op_packed));
  m.impl("conv2d_int8_packed_float", TORCH_BOX(&op_packed_float));
  m.impl("conv2d_int8_max_pool", TORCH_BOX(&op_max_pool));
}

INFER_SHIM aoti_torch_cpu_conv2d_int8_image(AtenTensorHandle x, double step, int64_t zero, int64_t low, int64_t border,
                                            int64_t channels, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("conv2d_int8_image",
                 [&] { std::tie(*ret0, *ret1) = image(View(x), step, zero, low, border, channels); });
}

INFER_SHIM aoti_torch_cpu_conv2d_int8_packed(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle start,
                                             AtenTensorHandle multiplier, AtenTensorHandle offset,
                                             AtenTensorHandle* residual, double residual_multiplier, double low,
                                             double high, int64_t out_channels, const int64_t* window, int64_t,
                                             const int64_t* borders, int64_t, int64_t fill, AtenTensorHandle* ret0) {
  return guarded("conv2d_int8_packed", [&] {
    *ret0 = to_image(convolution(View(x), View(weight), View(start), View(multiplier), View(offset),
                                 optional_view(residual), residual_multiplier, low, high, out_channels,
                                 {window, borders}),
                     fill);
  });
}

INFER_SHIM aoti_torch_cpu_conv2d_int8_packed_float(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle start,
                                                   AtenTensorHandle multiplier, AtenTensorHandle offset,
                                                   AtenTensorHandle* residual, double residual_multiplier, double low,
                                                   double high, int64_t out_channels, const int64_t* window, int64_t,
                                                   const int64_t* borders, int64_t, AtenTensorHandle poison,
                                                   AtenTensorHandle* ret0) {
  return guarded("conv2d_int8_packed_float", [&] {
    *ret0 = to_floats(convolution(View(x), View(weight), View(start), View(multiplier), View(offset),
                                  optional_view(residual), residual_multiplier, low, high, out_channels,
                                  {window, borders}),
                      View(poison));
  });
}

INFER_SHIM aoti_torch_cpu_conv2d_int8_max_pool(AtenTensorHandle x, const int64_t* window, int64_t,
                                               const int64_t* borders, int64_t, int64_t fill, AtenTensorHandle* ret0) {
  return guarded("conv2d_int8_max_pool", [&] { *ret0 = max_pool(View(x), {window, borders}, fill); });
}

extern "C" __attribute__((visibility("default"))) void infer_pack_conv(const int8_t* codes, int64_t out_channels,
                                                                       int64_t in_channels, int64_t stored,
                                                                       const int64_t* kernel, int32_t zero,
                                                                       int8_t* weight, int32_t* start) {
  conv_pack(codes, out_channels, in_channels, stored, kernel, zero, weight, start);
}
