"""Rows of a weight in blocks: from the model, or from a checkpoint while the model is on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from ...errors import SourceError, UsageError
from ...kernels.expert_layers import ExpertLinear
from ...kernels.ops.bitpack import GROUP
from ...weights import Checkpoint, StoredCodes, check_finite
from ..layer_kinds import by_rows, is_stored_by_columns
from ..quantizable_layers import Weight

BLOCK = 1 << 22  # weights in float at a time


@dataclass
class RowSource:
    """Source of a weight's rows: the model, or a checkpoint while the model is on meta."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    rows: Callable[[int, int], Tensor]
    rows_of_expert: int | None = None
    codes: StoredCodes | None = None  # of a source that is quantized; None where it is float

    def blocks(self, multiple: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, float32 block), checked for NaN and infinity, cut at multiples of `multiple` rows.

        A block holds rows of one expert.
        """
        columns = max(torch.Size(self.shape[1:]).numel(), 1)
        step = max(BLOCK // columns // multiple, 1) * multiple
        for part in range(0, self.shape[0], self.rows_of_expert or self.shape[0]):
            end = min(part + (self.rows_of_expert or self.shape[0]), self.shape[0])
            for start in range(part, end, step):
                block = self.rows(start, min(start + step, end)).detach().cpu().float().contiguous()
                check_finite(self.name, block, row=start)
                yield start, block


def row_source_of(
    weight: Weight, checkpoint: Checkpoint | None = None, renames: Mapping[str, str] | None = None
) -> RowSource:
    """Return the source of a weight's rows; `checkpoint` is used while the model is on meta."""
    tensor, layer = weight.tensor, weight.sites[0].layer
    if not tensor.is_meta and isinstance(layer, ExpertLinear):
        return _rows_of_experts(layer, tensor.dtype, weight.names[0], lambda first, last: tensor[first:last])
    rows = by_rows(layer, tensor)
    shape = tuple(rows.shape)
    if not tensor.is_meta:
        return RowSource(shape, tensor.dtype, weight.names[0], lambda start, stop: rows[start:stop])
    if checkpoint is None:
        raise UsageError(
            f"{weight.names[0]!r} has no data: the model is on the meta device and no checkpoint was given",
            hint="Give the checkpoint as source, and the model's code with --model file.py:factory",
        )
    name = stored_name(weight.names, checkpoint, renames)
    if name is None:
        raise SourceError(
            f"the checkpoint has no tensor {' or '.join(map(repr, weight.names))}",
            hint="It belongs to another model, or to another version of this one",
        )
    stored = checkpoint[name]
    if stored.shape != tuple(tensor.shape):
        raise SourceError(
            f"expected a weight of shape {list(tensor.shape)}, the checkpoint has {list(stored.shape)}",
            where=name,
            hint="The checkpoint belongs to a model of other sizes",
        )
    codes = stored.codes()
    if isinstance(layer, ExpertLinear):
        origin = _rows_of_experts(layer, stored.dtype, name, stored.rows)
        return replace(origin, codes=_fitting(codes, origin.shape, experts=True))
    if is_stored_by_columns(layer):  # a block of rows is in all rows that are stored
        whole = cache(lambda: by_rows(layer, stored.rows(0, len(tensor))))
        origin = RowSource(shape, stored.dtype, name, lambda start, stop: whole()[start:stop])
        refused = "the layer stores its weight by columns"
        return origin if codes is None else replace(origin, codes=StoredCodes.without(codes.kind, refused))
    origin = RowSource(
        shape, stored.dtype, name, lambda start, stop: by_rows(layer, stored.rows(start, stop))
    )
    return replace(origin, codes=_fitting(codes, shape, experts=False))


def stored_name(
    names: Iterable[str], checkpoint: Checkpoint, renames: Mapping[str, str] | None = None
) -> str | None:
    """Return the checkpoint's name of a parameter by its `names` in the model; None where the checkpoint lacks it."""
    named = renames or {}
    return next((n for own in names for n in (named.get(own, own),) if n in checkpoint), None)


def _fitting(codes: StoredCodes | None, shape: tuple[int, ...], *, experts: bool) -> StoredCodes | None:
    """Return the codes, with `refused` set where their layout or a partial group prevents carrying them over."""
    if codes is None or codes.refused:
        return codes
    if codes.shape != shape or codes.experts != experts:
        return StoredCodes.without(codes.kind, f"its codes are of {codes.shape}, the layer's rows of {shape}")
    if shape[1] % GROUP:
        return StoredCodes.without(codes.kind, f"rows of {shape[1]} columns are no multiple of {GROUP}")
    return codes


def _rows_of_experts(
    layer: ExpertLinear, dtype: torch.dtype, name: str, experts: Callable[[int, int], Tensor]
) -> RowSource:
    """Return the rows of all experts; a block reads the experts that it lies in, by `experts(first, last)`."""
    count = layer.out_features
    read = lru_cache(maxsize=1)(lambda e: by_rows(layer, experts(e, e + 1)))  # its blocks follow each other

    def rows(start: int, stop: int) -> Tensor:
        first = start // count
        parts = [read(e) for e in range(first, -(-stop // count))]
        held = parts[0] if len(parts) == 1 else torch.cat(parts)
        return held[start - first * count : stop - first * count]

    return RowSource((layer.num_experts * count, layer.in_features), dtype, name, rows, count)
