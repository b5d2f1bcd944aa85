"""Symbolic sizes of a module's inputs and outputs, from the shapes that its calls had.

Sizes that varied together over the calls are one symbolic size, within what was seen. Rows are told by a trial: an axis
is the batch where fewer rows give the same answers for those rows. All other sizes are fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.agreement import difference
from ..spec import BATCH, DTYPE_NAMES, TensorSpec

Axis = tuple[int, int]  # input, axis
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Input specs, and the bounds of the symbolic sizes other than the batch."""

    inputs: tuple[TensorSpec, ...]
    bounds: Mapping[str, tuple[int, int]]


def find_sizes(names: Sequence[str], calls: Sequence[Sequence[Tensor]], run: Run) -> Sizes:
    """Return the specs of inputs called `names`, of whose `calls` every one has the same ranks and dtypes.

    `run` is the module itself; it is called with fewer or with more rows of the smallest call.
    """
    first = calls[0]
    seen = {
        (index, axis): tuple(call[index].shape[axis] for call in calls)
        for index, tensor in enumerate(first)
        for axis in range(tensor.dim())
    }
    smallest = min(calls, key=lambda call: sum(tensor.numel() for tensor in call))
    batch = next((axes for axes in _hypotheses(seen) if _are_rows(axes, smallest, run)), {})
    symbols: dict[tuple[int, ...], str] = {}
    bounds: dict[str, tuple[int, int]] = {}
    shapes: list[tuple[int | str, ...]] = []
    for index, tensor in enumerate(first):
        shape: list[int | str] = []
        for axis in range(tensor.dim()):
            sizes = seen[index, axis]
            if batch.get(index) == axis:
                shape.append(BATCH)
            elif len(set(sizes)) == 1:
                shape.append(sizes[0])
            else:
                symbol = symbols.setdefault(sizes, f"{names[index]}_{axis}")
                bounds[symbol] = min(sizes), max(sizes)
                shape.append(symbol)
        shapes.append(tuple(shape))
    specs = (
        TensorSpec(name, DTYPE_NAMES[tensor.dtype], shape)
        for name, tensor, shape in zip(names, first, shapes, strict=True)
    )
    return Sizes(tuple(specs), bounds)


def _hypotheses(seen: Mapping[Axis, tuple[int, ...]]) -> Iterator[dict[int, int]]:
    """Yield the axes, by input, that may be the rows: in each input the first one of the same sizes in every call."""
    tried: list[dict[int, int]] = []
    for (_, _), sizes in sorted(seen.items(), key=lambda item: (item[0][1], item[0][0])):
        if 0 in sizes:
            continue
        axes: dict[int, int] = {}
        for (index, axis), others in seen.items():
            if others == sizes:
                axes.setdefault(index, axis)
        whole = [
            axes,
            *([{index: axis for index, axis in axes.items() if axis == 0}] if len(axes) > 1 else []),
        ]
        for hypothesis in whole:
            if hypothesis and hypothesis not in tried:
                tried.append(hypothesis)
                yield hypothesis


def _are_rows(axes: Mapping[int, int], call: Sequence[Tensor], run: Run) -> bool:
    """Return true where two rows of a call, and each of them alone, give one row of every output, and the same."""
    index, axis = next(iter(axes.items()))
    count = call[index].shape[axis]

    def taken(*rows: int) -> list[Tensor]:
        return [
            tensor.index_select(axes[i], torch.tensor([row % count for row in rows], device=tensor.device))
            if i in axes
            else tensor
            for i, tensor in enumerate(call)
        ]

    try:
        together, alone, last = run(taken(0, 1)), run(taken(0)), run(taken(1))
    except Exception:  # noqa: BLE001 - whatever it raises, the module does not take such rows
        return False
    return all(
        _has_rows(both, single, other) for both, single, other in zip(together, alone, last, strict=True)
    )


def _has_rows(both: Tensor, first: Tensor, second: Tensor) -> bool:
    for axis, (two, one) in enumerate(itertools.zip_longest(both.shape, first.shape)):
        if (two, one) != (2, 1):
            continue
        pairs = ((both.narrow(axis, 0, 1), first), (both.narrow(axis, 1, 1), second))
        return not any(difference(alone, cut) for cut, alone in pairs)
    return False
