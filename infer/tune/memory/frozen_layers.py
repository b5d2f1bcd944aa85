"""Packed layers of a whole model made ready for training: frozen, and transparent to gradients.

Linear layers, tied output heads, GPT-2's Conv1D, transposed convolutions and experts pass gradients to their inputs.
Embeddings need nothing: ids have no gradient. A packed convolution and a packed recurrent matrix are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...compress.conv_layers import QuantizedConv, QuantizedConvTranspose
from ...compress.packed_layers import QuantizedEmbedding, QuantizedExperts, QuantizedLinear, QuantizedMatrix
from ...compress.packed_weight import PackedLayer
from ...compress.quantizer import Quantizer
from ...errors import NotUsableError
from ...kernels.ops.bitpack import TABLE_ROWS
from .frozen_linear import Forward, frozen_linear
from .packed_rows import PackedRows, quantizer_of


@dataclass(frozen=True)
class FrozenCompute:
    """Replacement of a packed layer's `compute`: `quantizer.linear` with gradients."""

    quantizer: Quantizer
    forward: Forward

    def __call__(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        weight = PackedRows(tensors, self.quantizer.dequantize, self.quantizer.SHARED)
        return frozen_linear(x, weight, bias, self.quantizer, self.forward)


@dataclass(frozen=True)
class FrozenExperts:
    """Replacement of `compute` of packed experts: each expert that is asked for is one frozen linear layer."""

    quantizer: Quantizer
    forward: Forward

    def __call__(
        self, x: Tensor, expert: Tensor, tensors: Mapping[str, Tensor], features: int, top_k: int
    ) -> Tensor:
        whole = PackedRows(tensors, self.quantizer.dequantize, self.quantizer.SHARED)
        parts, places = [], []
        for e in torch.unique(expert).tolist():
            own = (expert == e).nonzero().squeeze(1)
            weight = whole.section(e * features, (e + 1) * features)
            parts.append(frozen_linear(x[own // top_k], weight, None, self.quantizer, self.forward))
            places.append(own)
        if not parts:
            return x.new_empty((0, features))
        return torch.cat(parts).index_select(0, torch.argsort(torch.cat(places)))


def pass_gradients(model: nn.Module, forward: Forward = "inference") -> list[str]:
    """Let gradients pass through every packed layer of `model`, in place; return the names of those layers.

    A second call changes `forward`. Raises `NotUsableError` for packed layers that can't, by name.
    """
    names, refused = [], []
    for name, layer in model.named_modules():
        if not isinstance(layer, PackedLayer) or isinstance(layer, QuantizedEmbedding):
            continue
        if reason := _why_not(layer):
            refused.append(f"{name} ({type(layer).__name__}: {reason})")
            continue
        quantizer = quantizer_of(layer.packed)
        make = FrozenExperts if isinstance(layer, QuantizedExperts) else FrozenCompute
        layer.compute = make(quantizer, forward)  # type: ignore[assignment]
        names.append(name)
    if refused:
        raise NotUsableError(
            f"{len(refused)} packed layers have no gradient: {', '.join(refused[:3])}",
            hint="Leave them in float: --layer NAME=float",
        )
    return names


def _why_not(layer: PackedLayer) -> str | None:
    if isinstance(layer, QuantizedConv):
        return "a packed convolution computes on int8 images"
    if isinstance(layer, QuantizedMatrix):
        return "a recurrent layer decodes it whole"
    if isinstance(layer, QuantizedExperts):
        shared = layer.packed.tensors().get("table")
        if shared is not None and len(shared) > 1 and layer.out_features % TABLE_ROWS:
            return f"{layer.out_features} rows of an expert are no multiple of {TABLE_ROWS}"
        return None
    known = isinstance(layer, (QuantizedLinear, QuantizedConvTranspose))
    return None if known else "its backward is not defined"
