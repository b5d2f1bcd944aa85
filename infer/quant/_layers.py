"""Layers whose weight is packed: what the walk puts in the place of Linear, Embedding and Conv2d."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels  # noqa: F401  registers the operators
from . import Quantizer
from ._sites import LAYERS


class Packed(nn.Module):
    """The packed tensors of one weight, as buffers. Layers with tied weights hold the same `Packed`.

    `.to(dtype)` moves the scales but doesn't round them; it sets `dtype`, the type of what a layer gives. `format` is
    what stands after --quant.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        decode: Callable[..., Tensor],
        dtype: torch.dtype,
        format: str = "",
    ) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.dtype, self.decode = dtype, decode
        self.format = format

    def tensors(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._buffers.items() if buffer is not None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Packed:
        before = self.tensors()
        self.dtype = fn(torch.zeros(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        for name, tensor in self.tensors().items():
            if tensor.dtype != before[name].dtype:
                self._buffers[name] = before[name].to(tensor.device)
        return self


class PackedLayer(nn.Module):
    """A layer whose weight, of so many values, is packed."""

    def __init__(self, packed: Packed, num_weights: int) -> None:
        super().__init__()
        self.packed, self.num_weights = packed, num_weights

    @property
    def weight(self) -> Tensor:
        """The float weight, decoded at each access: for code that asks for its dtype or shape."""
        return self.packed.decode(self.packed.tensors()).to(self.packed.dtype)


class QuantizedLinear(PackedLayer):
    """`nn.Linear` on a packed weight: x [..., in_features] → [..., out_features] in x's dtype."""

    def __init__(self, layer: nn.Linear, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias, self.compute = layer.bias, quantizer.linear

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(input, self.packed.tensors(), self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class QuantizedEmbedding(PackedLayer):
    """`nn.Embedding` on a packed weight: ids of any shape → [*ids.shape, embedding_dim]."""

    def __init__(self, layer: nn.Embedding, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx, self.compute = layer.padding_idx, quantizer.embedding

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(input, self.packed.tensors()).to(self.packed.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class QuantizedConv2d(PackedLayer):
    """`nn.Conv2d` on a packed weight: x [B, I, H, W] or [I, H, W]."""

    def __init__(self, layer: nn.Conv2d, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding, self.groups = _padding(layer), layer.groups
        self.bias, self.compute = layer.bias, quantizer.conv2d

    def forward(self, input: Tensor) -> Tensor:
        options: dict[str, Any] = {"stride": self.stride, "padding": self.padding}
        options |= {"dilation": self.dilation, "groups": self.groups, "kernel_size": self.kernel_size}
        batch = input if input.dim() == 4 else input[None]
        output = self.compute(batch, self.packed.tensors(), self.bias, options)
        return output if input.dim() == 4 else output[0]

    @property
    def weight(self) -> Tensor:
        """As of every layer; [out_channels, in_channels / groups, kh, kw]."""
        return super().weight.reshape(self.out_channels, -1, *self.kernel_size)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        )


def _padding(layer: nn.Conv2d) -> tuple[int, ...]:
    if layer.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    return (0, 0) if isinstance(layer.padding, str) else tuple(layer.padding)


def replacement(layer: nn.Module, packed: Packed, quantizer: Quantizer) -> nn.Module:
    """The quantized layer that takes the place of a Linear, Embedding or Conv2d."""
    if isinstance(layer, nn.Linear):
        return QuantizedLinear(layer, packed, quantizer)
    if isinstance(layer, nn.Embedding):
        return QuantizedEmbedding(layer, packed, quantizer)
    if isinstance(layer, nn.Conv2d):
        return QuantizedConv2d(layer, packed, quantizer)
    raise TypeError(f"no quantized form of {type(layer).__name__}")


def formats_of(model: nn.Module) -> list[tuple[str, str, float]]:
    """(layer, format, bits per weight) of every Linear, Embedding and Conv2d, packed or float, in order."""
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, PackedLayer):
            held = sum(tensor.nbytes for tensor in module.packed.tensors().values())
            rows.append((name, module.packed.format, held * 8 / module.num_weights))
        elif isinstance(module, LAYERS) and (weight := module._parameters.get("weight")) is not None:
            rows.append((name, "float", weight.dtype.itemsize * 8.0))
    return rows
