"""Layers with packed weights, which replace float ones, and the choice of the one for a float layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import kernels  # noqa: F401  registers the operators
from ..kernels.expert_layers import ExpertLinear
from .conv_layers import QuantizedConv, QuantizedConvTranspose
from .layer_kinds import (
    CONVOLUTIONS,
    TRANSPOSED,
    Matrix,
    embedding_scale,
    is_conv1d_of_gpt2,
    is_layer,
    rows_of,
)
from .packed_weight import Packed, PackedLayer
from .quantizer import Quantizer


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
    """`nn.Embedding`, perhaps scaled, on a packed weight: ids of any shape → [*ids.shape, embedding_dim]."""

    embed_scale: Tensor | float | None

    def __init__(self, layer: nn.Embedding, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx, self.compute = layer.padding_idx, quantizer.embedding
        scale = embedding_scale(layer)
        if isinstance(scale, Tensor):
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale

    def forward(self, input: Tensor) -> Tensor:
        y = self.compute(input, self.packed.tensors()).to(self.packed.dtype)
        scale = self.embed_scale
        return y if scale is None else y * (scale.to(y.dtype) if isinstance(scale, Tensor) else scale)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class QuantizedMatrix(PackedLayer):
    """`Matrix` on a packed weight, decoded by a call."""

    def __init__(self, layer: Matrix, packed: Packed, quantizer: Quantizer) -> None:
        super().__init__(packed, layer.weight.numel())
        self.owner, self.rows, self.compute = layer.owner, layer.weight.shape[0], quantizer.embedding

    def forward(self) -> Tensor:
        tensors = self.packed.tensors()
        if tensors["codes"].dtype in (
            torch.int8,
            torch.float16,
        ):  # two plain operators, which runtimes fuse or fold
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
