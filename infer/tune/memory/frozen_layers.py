"""Packed layers made ready for training: frozen, and transparent to gradients.

Linear layers, tied output heads, GPT-2's Conv1D, transposed convolutions and experts pass gradients to their inputs.
Embeddings need nothing: ids have no gradient. A packed convolution and a packed recurrent matrix are refused.

    y = x · Wᵀ + bias          forward: the kernels of inference, or decoded tiles
    grad_x = grad_y · W        backward: tiles of rows decoded one after another
    grad_bias = Σ grad_y       where the bias is trainable

Nothing but the packed weight is kept for the backward, so that a layer adds no activation of its own. The forward of
inference rounds activations to int8; its gradient is that of the product without the rounding (straight-through,
Bengio et al. 2013, arXiv 1308.3432), as in QLoRA (Dettmers et al. 2023, arXiv 2305.14314) for the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...compress.conv_layers import QuantizedConv, QuantizedConvTranspose
from ...compress.packed_layers import QuantizedEmbedding, QuantizedExperts, QuantizedLinear, QuantizedMatrix
from ...compress.packed_weight import PackedLayer
from ...compress.quantizer import Quantizer
from ...errors import NotUsableError
from ...kernels.ops.bitpack import TABLE_ROWS
from .packed_rows import (
    PACKED_TILE,
    TILE,
    PackedRows,
    inference_linear,
    is_abstract,
    note_workspace,
    quantizer_of,
)

Forward = Literal["inference", "decoded"]
FORWARDS = ("inference", "decoded")


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
        layer.compute = frozen_compute(layer, forward)  # type: ignore[assignment]
        names.append(name)
    if refused:
        raise NotUsableError(
            f"{len(refused)} packed layers have no gradient: {', '.join(refused[:3])}",
            hint="Leave them in float: --layer NAME=float",
        )
    return names


def frozen_compute(layer: PackedLayer, forward: Forward) -> FrozenCompute | FrozenExperts:
    """Return what takes the place of a layer's `compute` while its weight is frozen."""
    make = FrozenExperts if isinstance(layer, QuantizedExperts) else FrozenCompute
    return make(quantizer_of(layer.packed), forward)


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


def frozen_linear(
    x: Tensor, weight: PackedRows, bias: Tensor | None, quantizer: Quantizer, forward: Forward = "inference"
) -> Tensor:
    """Compute x [..., K] · weight [N, K]ᵀ + bias [N] → [..., N] with gradients of x and of the bias.

    The result has x's dtype, or autocast's where it is on. `forward`: "inference" has the numbers of inference,
    "decoded" those of float tiles in x's dtype. Raises `ValueError` where the columns differ.
    """
    if x.shape[-1] != weight.num_columns:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {weight.num_columns}")
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        y: Tensor = _FrozenLinear.apply(
            x.reshape(x.shape[:-1].numel(), x.shape[-1]), bias, weight, quantizer, forward
        )
    return y.reshape(*x.shape[:-1], weight.num_rows)


def frozen_linear_twin(x: Tensor, weight: PackedRows, bias: Tensor | None) -> Tensor:
    """Compute the decoded form of `frozen_linear` with the whole weight in x's dtype and torch's own gradient."""
    whole = weight.decode(weight.tensors).reshape(weight.num_rows, weight.num_columns).to(x.dtype)
    return F.linear(x, whole, None if bias is None else bias.to(x.dtype))


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: PackedRows, quantizer: Quantizer, forward: Forward
    ) -> Tensor:
        ctx.weight, ctx.bias_dtype = weight, None if bias is None else bias.dtype
        if is_abstract(x):
            note_workspace(x, forward_workspace(x, weight, forward))
            return x.new_empty((x.shape[0], weight.num_rows))
        if forward == "inference":
            return inference_linear(x, weight, bias, quantizer)
        y = x.new_empty((x.shape[0], weight.num_rows))
        for start, stop in weight.tiles():
            y[:, start:stop] = x @ weight.rows(start, stop, x.dtype).t()
        return y if bias is None else y + bias.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad_times_rows(grad, ctx.weight) if ctx.needs_input_grad[0] else None
        wanted = ctx.bias_dtype is not None and ctx.needs_input_grad[1]
        return grad_x, grad.float().sum(0).to(ctx.bias_dtype) if wanted else None, None, None, None


def forward_workspace(x: Tensor, weight: PackedRows, forward: Forward) -> int:
    """Return the bytes of a forward's temporaries: a packed tile and x in float32 and int8, or a decoded tile."""
    if forward == "inference":
        packed = sum(tensor.nbytes for tensor in weight.tensors.values())
        return min(packed, PACKED_TILE) + 5 * x.numel()
    return min(TILE, weight.num_rows * weight.num_columns) * 6


def grad_times_rows(grad: Tensor, weight: PackedRows) -> Tensor:
    """Compute grad [M, N] · weight [N, K] by decoded tiles; sums over tiles are at least float32."""
    total = torch.promote_types(grad.dtype, torch.float32)
    result = grad.new_zeros((grad.shape[0], weight.num_columns), dtype=total)
    if is_abstract(grad):
        note_workspace(grad, TILE * 6 + (0 if total == grad.dtype else TILE * 2 + 6 * result.numel()))
        return result.to(grad.dtype)
    for start, stop in weight.tiles():
        part = grad[:, start:stop]
        rows = weight.rows(start, stop, grad.dtype)
        if total == grad.dtype:
            result.addmm_(part, rows)
        else:
            result += part @ rows
    return result.to(grad.dtype)
