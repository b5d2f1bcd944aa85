// Which kernels compute a convolution, and how its panels and pixels are shared among threads.
#include <omp.h>

#include "conv/conv_loop.h"
#include "isa.h"

namespace infer_native {
namespace {

// Offsets of one image along the output pixels, in row-major order: a division for each would cost more than a tile.
struct Steps {
  int64_t start, column, row, sample;  // of the first pixel; added after a pixel, a row, a sample

  // Pixels `dx`, `dy` apart; the first at (border - padding) of an image with that border.
  Steps(const Image& image, int64_t border, int64_t top, int64_t left, int64_t dy, int64_t dx, const Image& out) {
    const int64_t line = (image.width + 2 * border) * image.channels, whole = (image.height + 2 * border) * line;
    start = top * line + left * image.channels;
    column = dx * image.channels;
    row = dy * line - out.width * column;
    sample = whole - out.height * dy * line;
  }

  int64_t at(int64_t s, int64_t y, int64_t x, const Image& out) const {
    const int64_t line = row + out.width * column;
    return start + s * (sample + out.height * line) + y * line + x * column;
  }
};

struct Cursor {
  const Image& out;
  const Steps &from, &to, &residual;
  int64_t sample, y, x, source, target, other;

  Cursor(const Image& image, const Steps& a, const Steps& b, const Steps& c, int64_t pixel)
      : out(image), from(a), to(b), residual(c) {
    x = pixel % out.width, y = pixel / out.width % out.height, sample = pixel / out.width / out.height;
    source = from.at(sample, y, x, out), target = to.at(sample, y, x, out), other = residual.at(sample, y, x, out);
  }

  void advance() {
    source += from.column, target += to.column, other += residual.column;
    if (++x < out.width) return;
    x = 0;
    source += from.row, target += to.row, other += residual.row;
    if (++y < out.height) return;
    y = 0, ++sample;
    source += from.sample, target += to.sample, other += residual.sample;
  }
};

// The parts of the walk that are equal for all tiles.
struct Walk {
  const Conv& conv;
  const ConvKernels& kernels;
  Steps from, to, residual;
  int64_t blocks, panels, quads, num_runs, run_quads, pixels;
  int64_t runs[MAX_RUNS];

  explicit Walk(const Conv& c) : conv(c), kernels(conv_kernels(c.out.batch * c.out.height * c.out.width)),
        from(c.in, c.in.border, c.in.border - c.window.padding[0], c.in.border - c.window.padding[1], c.window.stride[0],
             c.window.stride[1], c.out),
        to(c.out, c.out.border, c.out.border, c.out.border, 1, 1, c.out),
        residual(c.out, c.residual_border, c.residual_border, c.residual_border, 1, 1, c.out) {
    const Window& w = c.window;
    const int64_t channels = c.in.channels;
    const bool whole_rows = w.dilation[1] == 1;  // the taps of a row touch each other
    blocks = (c.out_channels + CONV_BLOCK - 1) / CONV_BLOCK;
    panels = (blocks + CONV_PANEL - 1) / CONV_PANEL;
    quads = conv_quads(channels, w.kernel);
    run_quads = (whole_rows ? w.kernel[1] * channels : channels) / 4;
    num_runs = 0;
    for (int64_t i = 0; i < w.kernel[0]; ++i)
      for (int64_t j = 0; j < (whole_rows ? 1 : w.kernel[1]); ++j)
        runs[num_runs++] = i * w.dilation[0] * c.in.row_bytes() + j * w.dilation[1] * channels;
    pixels = c.out.batch * c.out.height * c.out.width;
  }

  // Pixels [first, last) of one panel.
  void panel(int64_t panel, int64_t first, int64_t last) const {
    const int64_t count = std::min(blocks - panel * CONV_PANEL, CONV_PANEL), before = panel * CONV_PANEL;
    Tile tile{};
    tile.weight = conv.weight + before * quads * 64;
    tile.start = conv.start + before * CONV_BLOCK;
    tile.multiplier = conv.multiplier + before * CONV_BLOCK;
    tile.offset = conv.offset + before * CONV_BLOCK;
    tile.low = conv.low, tile.high = conv.high, tile.residual_multiplier = conv.residual_multiplier;
    tile.tail = std::min(conv.out_channels - (before + count - 1) * CONV_BLOCK, CONV_BLOCK);
    tile.num_runs = num_runs, tile.quads = run_quads, tile.runs = runs;
    const int64_t limit = kernels.limit[count - 1], tiles = (last - first + limit - 1) / limit;
    const int64_t channel = before * CONV_BLOCK;
    Cursor cursor(conv.out, from, to, residual, first);
    int64_t pixel = first;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t size = kernels.full_tiles ? std::min(limit, last - pixel) : (last - first) / tiles + (t < (last - first) % tiles);
      for (int64_t i = 0; i < size; ++i, ++pixel, cursor.advance()) {
        tile.x[i] = conv.x + cursor.source;
        if (conv.residual) tile.residual[i] = conv.residual + cursor.other + channel;
        if (conv.y) {
          tile.y[i] = conv.y + cursor.target + channel;
        } else {
          tile.y_float[i] = conv.y_float + pixel * conv.out_channels + channel;
          tile.poison[i] = conv.poison ? conv.poison[cursor.sample] : 0.0f;
        }
      }
      tile.pixels = static_cast<int>(size);
      kernels.kernels[count - 1][size - 1](tile);
    }
  }
};

}  // namespace

const ConvKernels& conv_kernels([[maybe_unused]] int64_t pixels) {
  [[maybe_unused]] const Isa* isa = &vector_isa();
#if defined(__x86_64__)
  const bool tiles = isa == &AVX512_VNNI && isa != &active_isa();
  if (tiles && pixels >= CONV_AMX.least) return CONV_AMX;
  if (isa == &AVX512_VNNI) return CONV_AVX512_VNNI;
  if (isa == &AVX2) return CONV_AVX2;
#elif defined(__aarch64__)
  if (isa == &NEON_DOTPROD) return CONV_NEON_DOTPROD;
#endif
  return CONV_SCALAR;
}

void conv2d(const Conv& conv) {
  const Walk walk(conv);
  if (walk.pixels == 0 || walk.panels == 0) return;
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
    // Each thread takes its own panels when there are enough of them, so that it reads a weight once; else pixels.
    const bool by_panel = walk.panels % threads == 0 && walk.panels * walk.quads * 256 > conv.in.batch * conv.in.bytes();
    const int64_t panel0 = by_panel ? walk.panels * own / threads : 0;
    const int64_t panel1 = by_panel ? walk.panels * (own + 1) / threads : walk.panels;
    const int64_t pixel0 = by_panel ? 0 : walk.pixels * own / threads;
    const int64_t pixel1 = by_panel ? walk.pixels : walk.pixels * (own + 1) / threads;
    if (pixel0 < pixel1) {
      if (walk.kernels.begin) walk.kernels.begin();
      for (int64_t panel = panel0; panel < panel1; ++panel) walk.panel(panel, pixel0, pixel1);
      if (walk.kernels.end) walk.kernels.end();
    }
    if (conv.y)
      for (int64_t sample = own; sample < conv.out.batch; sample += threads) 
        conv_fill_border(conv.out, conv.fill, conv.y + sample * conv.out.bytes());
  }
}

}  // namespace infer_native
