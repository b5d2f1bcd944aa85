"""int8 convolutions whose activations stay bytes from layer to layer, as `conv_fusion` connects them.

    conv2d_int8_image          float [B, C, H, W] → an image, and its poison
    conv2d_int8_packed         image → image: convolution, residual, clamp and the rounding for the next layer at once
    conv2d_int8_packed_float   image → float [B, H, W, O]
    conv2d_int8_max_pool       image → image

An image is uint8 [B, H + 2 border, W + 2 border, channels]: byte q is (q - zero) * step, the border holds `zero`,
and channels are padded (`stored_channels`). Poison is float32 [B], NaN for a sample that has a NaN: bytes can't say
so, and the last layer of a chain adds it. `window` is kernel, stride, padding, dilation; `borders` those of x,
residual and result.

    y = fma(float32(sum of (q - zero) * code), multiplier[o], offset[o])
    y = fma(residual, residual_multiplier, y)

clamped to low … high, and for an image rounded half to even. The native library computes them; `twin` and the others
here are the same in pure torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import cpu
from .define_op import declare

QUAD, BLOCK, PANEL = 4, 16, 4  # input channels of a quad, output channels of a block, blocks of a panel
MOST_TAPS = 64


def stored_channels(channels: int) -> int:
    """Channels of an image with padding: one quad for up to four, else whole blocks."""
    return QUAD if channels <= QUAD else -(-channels // BLOCK) * BLOCK


def pack(codes: Tensor, zero: int, stored: int) -> tuple[Tensor, Tensor]:
    """Pack codes int8 [O, I, kh, kw]: weight int8 [blocks, quads, 16, 4] and start int32 [blocks * 16]."""
    rows, channels, *kernel = codes.shape
    blocks, codes = -(-rows // BLOCK), codes.contiguous()
    weight = torch.empty((blocks, stored * kernel[0] * kernel[1] // 4, BLOCK, 4), dtype=torch.int8)
    start = torch.empty(blocks * BLOCK, dtype=torch.int32)
    cpu.load().infer_pack_conv(
        ctypes.c_void_p(codes.data_ptr()),
        *(ctypes.c_int64(size) for size in (rows, channels, stored)),
        (ctypes.c_int64 * 2)(*kernel),
        ctypes.c_int32(zero),
        *(ctypes.c_void_p(made.data_ptr()) for made in (weight, start)),
    )
    return weight, start


def pack_twin(codes: Tensor, zero: int, stored: int) -> tuple[Tensor, Tensor]:
    """Pack as `pack` does, in pure torch: panels of up to `PANEL` blocks, each [quads, blocks, 16, 4]."""
    rows, channels = codes.shape[:2]
    blocks = -(-rows // BLOCK)
    padded = F.pad(codes, (0, 0, 0, 0, 0, stored - channels, 0, blocks * BLOCK - rows))
    quads = padded.permute(0, 2, 3, 1).reshape(blocks, BLOCK, -1, 4)
    panels = [part.permute(2, 0, 1, 3).reshape(-1) for part in quads.split(PANEL)]
    start = -zero * padded.to(torch.int32).sum((1, 2, 3), dtype=torch.int32)
    return torch.cat(panels).reshape(blocks, -1, BLOCK, 4), start


def unpack(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the codes int8 [blocks * 16, stored channels, kh, kw] of a packed weight."""
    blocks, quads = weight.shape[:2]
    flat, parts, first = weight.reshape(-1), [], 0
    for at in range(0, blocks, PANEL):
        count = min(PANEL, blocks - at)
        part = flat[first : first + quads * count * BLOCK * 4].reshape(quads, count, BLOCK, 4)
        parts.append(part.permute(1, 2, 0, 3).reshape(count * BLOCK, *kernel, -1))
        first += part.numel()
    return torch.cat(parts).permute(0, 3, 1, 2)


def _inside(image: Tensor, border: int) -> Tensor:
    return image[:, border : image.shape[1] - border, border : image.shape[2] - border]


def _bordered(inside: Tensor, border: int, fill: int) -> Tensor:
    return F.pad(inside, (0, 0, border, border, border, border), value=fill).contiguous()


def image_twin(
    x: Tensor, step: float, zero: int, low: int, border: int, channels: int
) -> tuple[Tensor, Tensor]:
    """Compute `conv2d_int8_image` in pure torch, as its reference."""
    q = (x / step).nan_to_num(low - zero, 3e38, -3e38).clamp(low - zero, 255 - zero).round() + zero
    inside = F.pad(q.permute(0, 2, 3, 1), (0, channels - x.shape[1])).to(torch.uint8)
    poison = torch.where(x.isnan().flatten(1).any(1), torch.nan, 0.0)
    return _bordered(inside, border, zero), poison


def sums_twin(x: Tensor, weight: Tensor, start: Tensor, window: Sequence[int], border: int) -> Tensor:
    """Return the exact sums, float64 [B, blocks * 16, H, W]; the border of x is real input (zero points)."""
    kernel, stride, padding, dilation = (list(window[i : i + 2]) for i in range(0, 8, 2))
    top, left = border - padding[0], border - padding[1]
    image = x[:, top : x.shape[1] - top, left : x.shape[2] - left].permute(0, 3, 1, 2).double()
    sums = F.conv2d(image, unpack(weight, kernel).double(), None, stride, 0, dilation)
    return sums + start.double()[:, None, None]


def _fma(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """Multiply and add with one rounding; the product of two float32 is exact in float64."""
    return (a.float().double() * b + c.double()).float()


def values_twin(
    x: Tensor,
    weight: Tensor,
    start: Tensor,
    multiplier: Tensor,
    offset: Tensor,
    residual: Tensor | None,
    residual_multiplier: float,
    low: float,
    high: float,
    out_channels: int,
    window: Sequence[int],
    borders: Sequence[int],
) -> Tensor:
    """float32 [B, H, W, blocks * 16] before the rounding."""
    sums = sums_twin(x, weight, start, window, borders[0])
    y = _fma(sums.permute(0, 2, 3, 1), multiplier.double(), offset)
    if residual is not None:
        factor = torch.tensor(residual_multiplier, dtype=torch.float32).double()
        y = _fma(_inside(residual, borders[1]), float(factor), y)
    return y.clamp(low, high)


def twin(*operands: Any) -> Tensor:
    """Compute `conv2d_int8_packed` in pure torch, as its reference."""
    *values, fill = operands
    return _bordered(values_twin(*values).round().nan_to_num(0.0).to(torch.uint8), values[-1][2], fill)


def float_twin(*operands: Any) -> Tensor:
    """Compute `conv2d_int8_packed_float` in pure torch, as its reference."""
    *values, poison = operands
    out_channels = values[9]
    return (values_twin(*values)[..., :out_channels] + poison[:, None, None, None]).contiguous()


def max_pool_twin(x: Tensor, window: Sequence[int], borders: Sequence[int], fill: int) -> Tensor:
    """Compute `conv2d_int8_max_pool` in pure torch, as its reference."""
    kernel, stride, padding, dilation = (list(window[i : i + 2]) for i in range(0, 8, 2))
    inside = _inside(x, borders[0]).permute(0, 3, 1, 2).float()
    y = F.max_pool2d(inside, kernel, stride, padding, dilation).permute(0, 2, 3, 1)
    return _bordered(y.to(torch.uint8), borders[2], fill)


def _sizes(x: Tensor, window: Sequence[int], border: int) -> list[int | torch.SymInt]:
    return [
        (x.shape[1 + i] - 2 * border + 2 * window[4 + i] - window[6 + i] * (window[i] - 1) - 1)
        // window[2 + i]
        + 1
        for i in (0, 1)
    ]


def _image_shape(
    x: Tensor, step: float, zero: int, low: int, border: int, channels: int
) -> tuple[Tensor, Tensor]:
    sizes = (x.shape[0], x.shape[2] + 2 * border, x.shape[3] + 2 * border, channels)
    return x.new_empty(sizes, dtype=torch.uint8), x.new_empty((x.shape[0],), dtype=torch.float32)


def _packed_shape(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    window, borders = rest[8], rest[9]
    height, width = _sizes(x, window, borders[0])  # type: ignore[arg-type, index]
    edge = 2 * borders[2]  # type: ignore[index]
    return x.new_empty((x.shape[0], height + edge, width + edge, weight.shape[0] * BLOCK))


def _float_shape(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    channels, window, borders = rest[7], rest[8], rest[9]
    return x.new_empty(
        (x.shape[0], *_sizes(x, window, borders[0]), channels),  # type: ignore[arg-type, index]
        dtype=torch.float32,
    )


def _pool_shape(x: Tensor, window: Sequence[int], borders: Sequence[int], fill: int) -> Tensor:
    height, width = _sizes(x, window, borders[0])
    return x.new_empty((x.shape[0], height + 2 * borders[2], width + 2 * borders[2], x.shape[3]))


_OPERANDS = (
    "Tensor x, Tensor weight, Tensor start, Tensor multiplier, Tensor offset, Tensor? residual, "
    "float residual_multiplier, float low, float high, int out_channels, int[] window, int[] borders"
)
declare(
    "conv2d_int8_image(Tensor x, float step, int zero, int low, int border, int channels) -> (Tensor, Tensor)",
    _image_shape,
)
declare(f"conv2d_int8_packed({_OPERANDS}, int fill) -> Tensor", _packed_shape)
declare(f"conv2d_int8_packed_float({_OPERANDS}, Tensor poison) -> Tensor", _float_shape)
declare("conv2d_int8_max_pool(Tensor x, int[] window, int[] borders, int fill) -> Tensor", _pool_shape)
