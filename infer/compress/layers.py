"""Layers with packed weights, which replace float ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import kernels  # noqa: F401  registers the operators
from ..load.expert_layers import ExpertLinear
from . import Quantizer
from .layer_kinds import CONVOLUTIONS, TRANSPOSED, Matrix, is_conv1d_of_gpt2, is_layer, pair, rows_of


class Packed(nn.Module):
    """Packed tensors of one weight, as buffers; layers with tied weights hold the same `Packed`.

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
    """Base class of layers with a packed weight of `num_values` values."""

    def __init__(self, packed: Packed, num_weights: int) -> None:
        super().__init__()
        self.packed, self.num_weights = packed, num_weights

    @property
    def weight(self) -> Tensor:
        """Float weight, decoded at each access: for code that asks for its dtype or shape."""
        return self.packed.decode(self.packed.tensors()).to(self.packed.dtype)


class QuantizedLinear(PackedLayer):
    """`nn.Linear` on a packed weight: x [..., in_features] → [..., out_features] in x's dtype."""

    is_linear = True  # low-rank adapters are applied to its output

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


class QuantizedMatrix(PackedLayer):
    """`Matrix` on a packed weight, decoded by a call."""

    def __init__(self, layer: Matrix, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.owner, self.rows, self.compute = layer.owner, layer.weight.shape[0], quantizer.embedding

    def forward(self) -> Tensor:
        tensors = self.packed.tensors()
        if tensors["codes"].dtype == torch.int8:  # two plain operators, which runtimes fuse or fold
            return self.packed.decode(tensors).to(self.packed.dtype)
        every = torch.arange(self.rows, device=tensors["codes"].device)
        return self.compute(every, tensors).to(self.packed.dtype)


class QuantizedExperts(PackedLayer):
    """`ExpertLinear` on packed rows of all experts: x [R, K], expert int64 [R * top_k] → [R * top_k, N]."""

    def __init__(self, layer: ExpertLinear, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.num_experts, self.transposed = layer.num_experts, layer.transposed
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.compute = quantizer.experts

    def forward(self, x: Tensor, expert: Tensor, top_k: int) -> Tensor:
        return self.compute(x, expert, self.packed.tensors(), self.out_features, top_k)

    @property
    def weight(self) -> Tensor:
        """Float weight in the layout of the float layer, decoded at each access."""
        rows = super().weight.reshape(self.num_experts, self.out_features, self.in_features)
        return rows.transpose(1, 2) if self.transposed else rows

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, in_features={self.in_features}, out_features={self.out_features}"


class QuantizedConv1D(QuantizedLinear):
    """`Conv1D` of transformers on a packed weight: a Linear whose float weight is [in_features, out_features]."""

    def __init__(self, layer: nn.Module, packed: Packed, quantizer: Quantizer) -> None:
        outputs, inputs = rows_of(layer).shape
        linear = nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.bias = layer.bias  # type: ignore[assignment]
        super().__init__(linear, packed, quantizer)
        self.nf, self.nx = outputs, inputs

    @property
    def weight(self) -> Tensor:
        """Float weight [in_features, out_features], decoded at each access."""
        return super().weight.t()


class QuantizedConv(PackedLayer):
    """`nn.Conv2d` or `nn.Conv1d` on a packed weight: x [B, I, H, W], [B, I, L], or the same without B."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding, self.groups = _padding(layer), layer.groups
        self.bias, self.compute = layer.bias, quantizer.conv2d

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

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        )


class QuantizedConvTranspose(PackedLayer):
    """`nn.ConvTranspose2d` or `nn.ConvTranspose1d` on a packed weight, as one product and a sum of patches.

    Every pixel's channels times the weight [O * kh * kw, I] are the patch that it adds to; `F.fold` adds them up.
    """

    def __init__(
        self, layer: nn.ConvTranspose1d | nn.ConvTranspose2d, packed: Packed, quantizer: Quantizer
    ) -> None:
        super().__init__(packed, layer.weight.numel())
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        self.padding, self.output_padding = tuple(map(int, layer.padding)), layer.output_padding
        self.bias, self.compute = layer.bias, quantizer.linear

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        spatial = len(self.kernel_size)
        batch = input if input.dim() == spatial + 2 else input[None]
        more = self._output_padding(batch, output_size)
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

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        )


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


def replacement(layer: nn.Module, packed: Packed, quantizer: Quantizer) -> nn.Module:
    """Build the quantized layer that replaces a float one."""
    if isinstance(layer, nn.Linear):
        return QuantizedLinear(layer, packed, quantizer)
    if isinstance(layer, nn.Embedding):
        return QuantizedEmbedding(layer, packed, quantizer)
    if isinstance(layer, CONVOLUTIONS):
        return QuantizedConv(layer, packed, quantizer)
    if isinstance(layer, TRANSPOSED):
        return QuantizedConvTranspose(layer, packed, quantizer)
    if isinstance(layer, Matrix):
        return QuantizedMatrix(layer, packed, quantizer)
    if isinstance(layer, ExpertLinear):
        return QuantizedExperts(layer, packed, quantizer)
    if is_conv1d_of_gpt2(layer):
        return QuantizedConv1D(layer, packed, quantizer)
    raise TypeError(f"no quantized form of {type(layer).__name__}")


def formats_of(model: nn.Module) -> list[tuple[str, str, float]]:
    """List (layer, format, bits per weight) of every layer with a quantized form, packed or float, in order."""
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, PackedLayer):
            held = sum(tensor.nbytes for tensor in module.packed.tensors().values())
            rows.append((name, module.packed.format, held * 8 / module.num_weights))
        elif is_layer(module) and (weight := module._parameters.get("weight")) is not None:
            rows.append((name, "float", weight.dtype.itemsize * 8.0))
    return rows
