"""Layers whose weight stays on disk: rows are read in blocks at each forward, so a model may exceed memory.

Each calls one `infer::streamed_*` operator, so that the float reference can be captured too; such a graph
runs only in the process that opened the checkpoint.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ...kernels.expert_layers import ExpertLinear
from ...kernels.ops.linear_experts import by_expert
from ...weights import Checkpoint, Weight
from ...weights.file_blocks import row_blocks

BLOCK_BYTES = 16 << 20
_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
_OPEN: dict[str, Weight] = {}
_COUNT = itertools.count()


class StreamedLayer(nn.Module):
    """Replacement of a Linear, Embedding or Conv; `weight` has its shape and dtype but no values."""

    def __init__(self, layer: nn.Module, stored: Weight, source: str) -> None:
        super().__init__()
        weight = _weight(layer)
        self.kind, self.shape = type(layer).__name__, tuple(weight.shape)
        self.dtype: torch.dtype = weight.dtype
        self.key = f"{source}#{next(_COUNT)}"
        self.bias = getattr(layer, "bias", None)
        self.geometry = _geometry(layer)
        _OPEN[self.key] = stored
        weakref.finalize(self, _OPEN.pop, self.key, None)

    @property
    def weight(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Compute the replaced layer's output; the peak is one block of rows above the output."""
        if self.kind == "Linear":
            return torch.ops.infer.streamed_linear(x, self.bias, self.key, self.shape[0])
        if self.kind == "Embedding":
            return torch.ops.infer.streamed_embedding(x, self.key, self.shape[1], self.dtype)
        stride, padding, dilation, groups = self.geometry
        return torch.ops.infer.streamed_conv(
            x, self.bias, self.key, list(self.shape), stride, padding, dilation, groups
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StreamedLayer:
        """Set the dtype to which rows are cast when read, as `.to(dtype)` asks."""
        self.dtype = fn(torch.zeros(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{self.kind}, {list(self.shape)}, from {self.key!r}"


class StreamedExperts(StreamedLayer):
    """Replacement of an `ExpertLinear`: a call reads its routed experts, one after another."""

    def __init__(self, layer: ExpertLinear, stored: Weight, source: str) -> None:
        super().__init__(layer, stored, source)
        self.features, self.transposed = layer.out_features, layer.transposed

    def forward(self, x: Tensor, expert: Tensor, top_k: int) -> Tensor:  # type: ignore[override]
        """Compute the replaced layer's output; the peak is one expert above the output."""
        return torch.ops.infer.streamed_experts(x, expert, self.key, self.features, top_k, self.transposed)


def stream_layers(module: nn.Module, checkpoint: Checkpoint, source: Callable[[str], str]) -> str:
    """Replace every meta Linear, Embedding, Conv and expert layer by a streamed one; report the bytes left on disk."""
    count, size = 0, 0
    for prefix, owner in list(module.named_modules()):
        for attribute, child in list(owner.named_children()):
            name = f"{prefix}.{attribute}.weight" if prefix else f"{attribute}.weight"
            if not _streamable(child) or source(name) not in checkpoint:
                continue
            count, size = count + 1, size + _weight(child).numel() * _weight(child).element_size()
            kind = StreamedExperts if isinstance(child, ExpertLinear) else StreamedLayer
            setattr(
                owner, attribute, kind(child, checkpoint[source(name)], source(name)).train(child.training)
            )  # type: ignore[arg-type]
    return f"{count} layers, {size / 1e6:.1f} MB, stay on disk and are read at each forward"


def _weight(layer: nn.Module) -> Tensor:
    return cast(Tensor, layer.weight)


def _streamable(layer: nn.Module) -> bool:
    if type(layer) is nn.Embedding:
        return layer.weight.is_meta and layer.max_norm is None
    if type(layer) is nn.Linear or isinstance(layer, ExpertLinear):
        return layer.weight.is_meta
    if isinstance(layer, _ConvNd) and type(layer) in _CONVOLUTIONS:
        return layer.weight.is_meta and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return False


def _geometry(layer: nn.Module) -> tuple[list[int], list[int], list[int], int]:
    if not isinstance(layer, _ConvNd) or isinstance(layer.padding, str):
        return [], [], [], 1
    return list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups


def _blocks(key: str, like: Tensor, step: int = 1) -> Iterator[tuple[int, int, Tensor]]:
    """Yield blocks of rows with the dtype and device of `like`, cut at multiples of `step`."""
    stored = _OPEN[key]
    shape = stored.shape
    limit = BLOCK_BYTES
    for start, stop in row_blocks((shape[0] // step, step, *shape[1:]), stored.dtype.itemsize, limit):
        yield start * step, stop * step, stored.rows(start * step, stop * step).to(like)


@torch.library.custom_op("infer::streamed_linear", mutates_args=())
def streamed_linear(x: Tensor, bias: Tensor | None, key: str, rows: int) -> Tensor:
    """Compute F.linear with the weight read in blocks of rows: x [..., in] → [..., rows]."""
    out = x.new_empty((*x.shape[:-1], rows))
    for start, stop, weight in _blocks(key, x):
        out[..., start:stop] = F.linear(x, weight, None if bias is None else bias[start:stop])
    return out


@streamed_linear.register_fake
def _(x: Tensor, bias: Tensor | None, key: str, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


@torch.library.custom_op("infer::streamed_experts", mutates_args=())
def streamed_experts(
    x: Tensor, expert: Tensor, key: str, features: int, top_k: int, transposed: bool
) -> Tensor:
    """Compute `infer::linear_experts`, reading the routed experts: x [R, K] → [R * top_k, features]."""
    stored = _OPEN[key]

    def compute(rows: Tensor, e: int) -> Tensor:
        weight = stored.rows(e, e + 1)[0].to(rows)
        return F.linear(rows, weight.t() if transposed else weight)

    return by_expert(x, expert, stored.shape[0], features, top_k, compute)


@streamed_experts.register_fake
def _(x: Tensor, expert: Tensor, key: str, features: int, top_k: int, transposed: bool) -> Tensor:
    return x.new_empty((expert.shape[0], features))


@torch.library.custom_op("infer::streamed_embedding", mutates_args=())
def streamed_embedding(ids: Tensor, key: str, width: int, dtype: torch.dtype) -> Tensor:
    """Compute F.embedding, reading only the rows that `ids` name: ids [...] → [..., width]."""
    stored = _OPEN[key]
    wanted, place = torch.unique(ids, return_inverse=True)
    table = torch.empty((len(wanted), width), dtype=dtype)
    for row, index in enumerate(wanted.tolist()):
        if not 0 <= index < stored.shape[0]:
            raise IndexError(f"id {index} is not in 0..{stored.shape[0] - 1}")
        table[row] = stored.rows(index, index + 1)[0]
    return table.to(ids.device)[place]


@streamed_embedding.register_fake
def _(ids: Tensor, key: str, width: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


@torch.library.custom_op("infer::streamed_conv", mutates_args=())
def streamed_conv(
    x: Tensor,
    bias: Tensor | None,
    key: str,
    shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Compute a convolution whose weight [out, in / groups, …] is read in blocks of output channels."""
    convolve = _convolution(len(shape))
    per_out, per_in = shape[0] // groups, shape[1]
    parts = []
    for start, stop, weight in _blocks(key, x, per_out if groups > 1 else 1):
        first, last = (start // per_out, stop // per_out) if groups > 1 else (0, 1)
        channels = x[:, first * per_in : last * per_in] if groups > 1 else x
        piece = None if bias is None else bias[start:stop]
        parts.append(convolve(channels, weight, piece, stride, padding, dilation, last - first))
    return torch.cat(parts, dim=1)


@streamed_conv.register_fake
def _(
    x: Tensor,
    bias: Tensor | None,
    key: str,
    shape: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return _convolution(len(shape))(x, x.new_empty(shape), None, stride, padding, dilation, groups)


def _convolution(rank: int) -> Callable[..., Tensor]:
    return {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[rank]
