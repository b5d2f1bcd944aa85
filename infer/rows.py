"""Rows of named tensors: each lies along its own axis named "batch", or has none and is shared by all rows.

A recurrent state is [layers, batch, hidden], a sampling rate a number, a table the same for everyone. Rows are counted,
cut, taken and joined here, of torch tensors and of numpy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .spec import BATCH, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Value = TypeVar("Value", Tensor, np.ndarray)

LARGE = 1 << 21  # values of the inputs of a call, from which on it is not taken for a row: a volume, say


def have_rows(inputs: Iterable[TensorSpec]) -> bool:
    """Return true where inputs can be cut into rows: one of them has a batch axis."""
    return any(spec.batched for spec in inputs)


def are_joinable(inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> bool:
    """Return true where rows of several calls can be one call's: inputs have rows, every output one for each."""
    return have_rows(inputs) and all(spec.batched for spec in outputs)


def without(specs: Iterable[TensorSpec], name: str = "rows") -> tuple[TensorSpec, ...]:
    """Return specs whose batch is a size like any other, as where a call can't be cut into rows."""
    return tuple(
        TensorSpec(s.name, s.dtype, tuple(name if size == BATCH else size for size in s.shape)) for s in specs
    )


def takes_one(inputs: Iterable[Sequence[int | str]], outputs: Iterable[Sequence[int | str]] = ()) -> bool:
    """Return true where a call takes one row: all its shapes begin with the number 1, and some have more sizes.

    Inputs that are a single number belong to all rows. False of `LARGE` inputs, of which a row can take seconds:
    comparing eight of them on every backend takes minutes.
    """
    taken = [tuple(shape) for shape in inputs if len(shape)]
    shapes = [*taken, *map(tuple, outputs)]
    values = sum(math.prod(size for size in shape if isinstance(size, int)) for shape in taken)
    several = any(len(shape) > 1 for shape in shapes)
    return {shape[:1] for shape in shapes} == {(1,)} and several and values < LARGE


def with_batch(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return specs with the batch in place of the first size; single numbers have none."""
    return tuple(
        TensorSpec(spec.name, spec.dtype, (BATCH, *spec.shape[1:])) if spec.shape else spec for spec in specs
    )


def lie_first(specs: Iterable[TensorSpec]) -> bool:
    """Return true where every tensor has its rows along its first axis."""
    return all(spec.batch_axis == 0 for spec in specs)


def count(specs: Iterable[TensorSpec], values: Mapping[str, Any]) -> int:
    """Return the number of rows; 1 where nothing has any."""
    return min((values[s.name].shape[s.batch_axis] for s in specs if s.batch_axis is not None), default=1)


def cut(specs: Iterable[TensorSpec], values: Mapping[str, Value], start: int, stop: int) -> dict[str, Value]:
    """Return rows from `start` to `stop`, and what all rows share."""
    return {spec.name: one(spec, values[spec.name], start, stop) for spec in specs}


def one(spec: TensorSpec, value: Value, start: int, stop: int) -> Value:
    """Return rows from `start` to `stop` of one tensor; the whole of one that has no rows."""
    axis = spec.batch_axis
    if axis is None:
        return value
    place: list[Any] = [slice(None) for _ in range(axis)]
    whole: Any = (*place, slice(start, stop))
    return value[whole]


def take(specs: Iterable[TensorSpec], values: Mapping[str, Tensor], index: torch.Tensor) -> dict[str, Tensor]:
    """Return the rows of tensors that `index`, int64 [rows], lists."""
    return {
        spec.name: values[spec.name]
        if spec.batch_axis is None
        else values[spec.name].index_select(spec.batch_axis, index.to(values[spec.name].device))
        for spec in specs
    }


def join(specs: Iterable[TensorSpec], parts: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Join the rows of several calls in order; what all rows share is that of the first."""
    return {spec.name: joined(spec, [part[spec.name] for part in parts]) for spec in specs}


def joined(spec: TensorSpec, values: Sequence[Value]) -> Value:
    """Join the rows of one tensor of several calls."""
    axis, first = spec.batch_axis, values[0]
    if axis is None or len(values) == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate(values, axis)
    import torch

    return torch.cat(list(values), axis)  # type: ignore[arg-type]


def first(specs: Iterable[TensorSpec], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with their rows along the first axis, as what compares rows takes them."""
    axes = {spec.name: spec.batch_axis for spec in specs}
    return {
        name: value.movedim(axes[name] or 0, 0) if value.dim() else value for name, value in values.items()
    }
