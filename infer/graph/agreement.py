"""The captured graph against the module that it was captured of, at small and extreme sizes.

A graph can differ from the code that its user runs: the exporter takes two rows or more for granted, the code may ask
whether it is being compiled, and a library may have a faster path that gives other numbers. Nothing that is judged by
the graph would show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import library_errors
from ..errors import SourceError
from ..library_errors import quiet
from ..rows import have_rows
from ..spec import BATCH, TensorSpec
from .program import Graph, flatten

ROWS = (2, 1, 3)  # compared, where the graph takes them
TOLERANCE = 1e-3  # of an output's root mean square at that place over the rows
FLOOR = 1e-5  # of the root mean square of the whole output: rounding
MOST_GROWTH, MOST_VALUES = 64, 1 << 18  # of the inputs of one row at the largest length that is tried
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Disagreement:
    """A size of the inputs at which graph and module give other numbers; `size` is "" where any size shows it."""

    size: str
    value: int
    text: str  # what differs


def require_comparable(call: Callable[[Inputs], Mapping[str, Tensor] | list[Tensor]], inputs: Inputs) -> None:
    """Raise `SourceError` where two runs of the original differ, or an output has no finite value.

    Also where it fails, with its reason.
    """
    with quiet(), torch.no_grad(), library_errors.float_model_errors(inputs):
        first, second = (_named(call(clones(inputs))) for _ in range(2))
    for name, value in first.items():
        if not value.is_floating_point() or not value.numel():
            continue
        if not bool(value.isfinite().any()):
            what = "NaN" if bool(value.isnan().any()) else "infinite"
            raise SourceError(
                f"every value of {name} is {what} in the original itself: no result can be compared with it",
                hint="Mend the model, or give inputs for which it computes numbers with --data",
            )
    for name, value in first.items():
        if why := difference(value, second[name]):
            raise SourceError(
                f"two runs of the original on the same rows differ: {name} {why}; no result can be compared with it",
                hint="Take out the random draws (dropout in training mode, RandomNormal, randn_like) or the state "
                "that it keeps between calls, or make them inputs of the model",
            )


def _named(outputs: Mapping[str, Tensor] | list[Tensor]) -> dict[str, Tensor]:
    if isinstance(outputs, Mapping):
        return {f"output {name!r}": value for name, value in outputs.items()}
    return {f"output {index}": value for index, value in enumerate(outputs)}


def disagreement(module: nn.Module, graph: Graph) -> Disagreement | None:
    """Return the first size at which the graph gives other numbers than its module, None where it agrees.

    Sizes that the module itself does not take are left out.
    """
    call = graph.callable()
    for size, value, inputs in _sized(graph):
        with buffers_kept(module), quiet(), torch.no_grad():
            try:
                expected = flatten(module(**clones(inputs)))
            except Exception:  # noqa: BLE001 - whatever the model raises there, it does not take that size
                continue
            try:
                got = call(**clones(inputs))
            except Exception as error:  # noqa: BLE001 - a guard of the exporter, or an operator that fails
                return Disagreement(size, value, f"it is refused: {library_errors.describe(error)}")
        if len(expected) != len(got):
            return Disagreement(size, value, f"it has {len(got)} outputs, the model's code {len(expected)}")
        for spec, one, other in zip(graph.outputs, expected, got, strict=True):
            if why := difference(in_shape_of(one, other), other):
                return Disagreement(size, value, f"output {spec.name!r} {why}")
    return None


def in_shape_of(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` with the axes of length one that `squeeze()` took from it where a batch has one row."""
    lost = value.shape != like.shape and [n for n in value.shape if n != 1] == [
        n for n in like.shape if n != 1
    ]
    return value.reshape(like.shape) if lost else value


def difference(expected: Tensor, got: Tensor) -> str:
    """Return how two outputs differ beyond rounding, `differs by 12.0%, …`; "" where they do not."""
    if expected.shape != got.shape:
        return f"has shape {list(got.shape)}, expected {list(expected.shape)}"
    if not expected.numel() or (expected.is_floating_point() and torch.equal(expected, got)):
        return ""
    if not expected.is_floating_point():
        count = int((expected != got).sum())
        return f"differs in {count} of {expected.numel()} values" if count else ""
    one, other = expected.detach().double(), got.detach().double()
    finite = one.isfinite() & other.isfinite()
    if bool(((one != other) & ~finite & ~(one.isnan() & other.isnan())).any()):
        return "is NaN or infinite at other places"
    one, other = one.where(finite, 0.0), other.where(finite, 0.0)
    whole = float(one.square().mean().sqrt())
    scale = one.square().mean(0, keepdim=True).sqrt() if one.dim() else one.abs()
    error = (other - one).abs()
    if not bool((error > TOLERANCE * scale + FLOOR * whole + 1e-30).any()):
        return ""
    relative = float((other - one).norm()) / max(float(one.norm()), math.ulp(0.0))
    return f"differs by {relative:.1%}, at one place by {float(error.max()):.3g}"


def _sized(graph: Graph) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
    """Yield the inputs to compare with: few rows, then one row at the ends of every other symbolic size."""
    low, high = graph.sizes.get(BATCH, (1, 1))
    batched = have_rows(graph.inputs)
    sizes = [rows for rows in ROWS if low <= rows <= high] if batched else []
    for rows in sizes:
        size = "" if rows == sizes[0] else BATCH
        yield size, rows, {spec.name: spec.with_rows(graph.samples[spec.name], rows) for spec in graph.inputs}
    if not sizes:
        yield "", 0, _few(graph)
    yield from at_extremes(graph)


def at_extremes(graph: Graph) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
    """Yield the fewest rows of the samples at both ends of every symbolic size but the batch: size, length, inputs.

    The largest length is bounded by the work that it would be.
    """
    few = _few(graph)
    for size, (least, most) in graph.sizes.items():
        if size == BATCH or least == most or not any(size in spec.shape for spec in graph.inputs):
            continue
        step = graph.multiples.get(size, 1)
        longest = _affordable(graph.inputs, few, size, most) // step * step
        for length in dict.fromkeys((least, max(longest, least))):
            resized = {spec.name: spec.with_sizes(few[spec.name], {size: length}) for spec in graph.inputs}
            yield size, length, resized


def _few(graph: Graph) -> dict[str, Tensor]:
    rows = graph.sizes.get(BATCH, (1, 1))[0]
    return {spec.name: spec.with_rows(graph.samples[spec.name], rows) for spec in graph.inputs}


def _affordable(specs: tuple[TensorSpec, ...], row: Inputs, size: str, most: int) -> int:
    """Return the largest length up to `most` at which a row of the inputs stays within bounds."""
    have = max(row[spec.name].shape[spec.shape.index(size)] for spec in specs if size in spec.shape)
    values = sum(row[spec.name].numel() for spec in specs if size in spec.shape)
    growth = max(1.0, min(MOST_GROWTH, MOST_VALUES / max(1, values)))
    return max(min(most, have), min(most, int(have * growth)))


def clones(inputs: Inputs) -> dict[str, Tensor]:
    """Copy inputs, since a model may write into them."""
    return {name: value.clone() for name, value in inputs.items()}


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore the values of all buffers at the end, since calls may change them."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
