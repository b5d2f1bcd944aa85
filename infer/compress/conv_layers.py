"""Convolutions and transposed convolutions on packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import kernels  # noqa: F401  registers the operators
from .layer_kinds import pair
from .packed_weight import Packed, PackedLayer
from .quantizer import Quantizer

Convolution = nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.ConvTranspose2d


class _PackedConv(PackedLayer):
    """Sizes and bias that a convolution on a packed weight takes over from the float layer."""

    def __init__(self, layer: Convolution, packed: Packed) -> None:
        super().__init__(packed, layer.weight.numel())
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.bias = layer.bias

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        )


class QuantizedConv(_PackedConv):
    """`nn.Conv2d` or `nn.Conv1d` on a packed weight: x [B, I, H, W], [B, I, L], or the same without B."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(layer, packed)
        self.padding, self.groups, self.compute = _padding(layer), layer.groups, quantizer.conv2d

    def forward(self, input: Tensor) -> Tensor:
        options: dict[str, Any] = {"stride": pair(self.stride, 1), "padding": pair(self.padding, 0)}
        options |= {"dilation": pair(self.dilation, 1), "groups": self.groups}
        options["kernel_size"] = pair(self.kernel_size, 1)
        image = input.unsqueeze(-2) if len(self.kernel_size) == 1 else input
        batch = image if image.dim() == 4 else image[None]
        output = self.compute(batch, self.packed.tensors(), self.bias, options)
        output = output if image.dim() == 4 else output[0]
        return output.squeeze(-2) if len(self.kernel_size) == 1 else output

    @property
    def weight(self) -> Tensor:
        """Float weight [out_channels, in_channels / groups, *kernel_size], decoded at each access."""
        return super().weight.reshape(self.out_channels, -1, *self.kernel_size)


class QuantizedConvTranspose(_PackedConv):
    """`nn.ConvTranspose2d` or `nn.ConvTranspose1d` on a packed weight, as one product and a sum of patches.

    Every pixel's channels times the weight [O * kh * kw, I] are the patch that it adds to; `F.fold` adds them up. On
    weights of 16 bits the float layer runs, which is faster (.93 of float in ONNX Runtime, the product 1.22) and which
    runtimes fold; int8 weights stay a product, whose packed form TensorRT has.
    """

    def __init__(
        self, layer: nn.ConvTranspose1d | nn.ConvTranspose2d, packed: Packed, quantizer: Quantizer
    ) -> None:
        super().__init__(layer, packed)
        self.padding, self.output_padding = tuple(map(int, layer.padding)), layer.output_padding
        self.compute = quantizer.linear

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        spatial = len(self.kernel_size)
        batch = input if input.dim() == spatial + 2 else input[None]
        more = self._output_padding(batch, output_size)
        if self.packed.tensors()["codes"].dtype == torch.float16:
            call = F.conv_transpose1d if spatial == 1 else F.conv_transpose2d
            bias = None if self.bias is None else self.bias.to(batch.dtype)
            last = (self.stride, self.padding, more, 1, self.dilation)
            output = call(batch, self.weight.to(batch.dtype), bias, *last)  # type: ignore[operator]
            return output if input.dim() == spatial + 2 else output[0]
        image = batch.unsqueeze(-2) if spatial == 1 else batch
        patches = self.compute(image.movedim(1, -1).contiguous(), self.packed.tensors(), None)
        kernel, stride, dilation = pair(self.kernel_size, 1), pair(self.stride, 1), pair(self.dilation, 1)
        output = add_patches(patches, kernel, stride, pair(self.padding, 0), dilation, pair(more, 0))
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)[:, None, None]
        output = output.squeeze(-2) if spatial == 1 else output
        return output if input.dim() == spatial + 2 else output[0]

    def _output_padding(self, batch: Tensor, output_size: Sequence[int] | None) -> Sequence[int]:
        if output_size is None:
            return self.output_padding
        given = output_size[-len(self.kernel_size) :]
        least = [
            (batch.shape[2 + i] - 1) * self.stride[i]
            - 2 * self.padding[i]
            + self.dilation[i] * (self.kernel_size[i] - 1)
            + 1
            for i in range(len(self.kernel_size))
        ]
        return [size - low for size, low in zip(given, least, strict=True)]

    @property
    def weight(self) -> Tensor:
        """Float weight [in_channels, out_channels, *kernel_size], decoded at each access."""
        return super().weight.t().reshape(self.in_channels, self.out_channels, *self.kernel_size)


def add_patches(
    patches: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    more: tuple[int, int],
) -> Tensor:
    """Sum patches [B, H, W, O * kh * kw] into outputs [B, O, H', W']; `more` is output_padding."""
    batch, height, width, _ = patches.shape
    if kernel == stride and padding == more == (0, 0) and dilation == (1, 1):  # patches that do not overlap
        parts = patches.reshape(batch, height, width, -1, *kernel).permute(0, 3, 1, 4, 2, 5)
        return parts.reshape(batch, parts.shape[1], height * kernel[0], width * kernel[1])
    sizes = [
        (size - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + more[i] + 1
        for i, size in enumerate((height, width))
    ]
    columns = patches.reshape(batch, height * width, -1).transpose(1, 2)
    return F.fold(columns, sizes, kernel, dilation, padding, stride)  # type: ignore[arg-type]


def _padding(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    if layer.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    return (0,) * len(layer.kernel_size) if isinstance(layer.padding, str) else tuple(layer.padding)
