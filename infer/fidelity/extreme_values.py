"""Comparison at values that the rows do not hold: larger numbers, zeros, and others of their range.

A sum above 2^24 in float32, a conversion that saturates, an integer computed in fewer bits: such faults show at few
values, which the rows may not hold and the next request will. What the original itself does not determine is not
judged: a value that moves when the inputs are rounded, and rows at which it fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .. import rows
from ..spec import BATCH, TensorSpec
from .input_rounding import RoundedRun, Run, beyond_rounding

FACTORS = {"values x .25 to 4": (0.25, 4.0), "values x 100": (100.0, 100.0)}  # of the numbers of a row
ROWS, FEW, MANY = 8, 2, 64  # compared at each place; of a slow model; of a small one
SLOW, SLOWEST = 0.05, 0.5  # seconds of a row, from which on few are compared, and a single one
SMALL = 1 << 16  # values of the inputs of all rows


def places(
    inputs: Sequence[TensorSpec],
    samples: Mapping[str, Tensor],
    sizes: Mapping[str, tuple[int, int]],
    multiples: Mapping[str, int],
    reference: Run,
    run: Run,
    others: Sequence[RoundedRun] = (),
    *,
    row_seconds: float = 0.0,
) -> Iterator[tuple[str, dict[str, Tensor], Run]]:
    """Yield names of places with rows made from `samples`, and what answers for `run` there; see `beyond_rounding`.

    `row_seconds`: what a row is known to take in `reference`; 0 where it is not known.
    """
    free = [spec for spec in inputs if spec.batched and not _is_mask(samples[spec.name])]
    if not free:
        return
    count = _count(inputs, samples, sizes.get(BATCH, (1, 1)), multiples.get(BATCH, 1), run, row_seconds)
    given = {spec.name: spec.with_rows(samples[spec.name], count) for spec in inputs}
    answers = beyond_rounding(reference, run, free, others)
    for where, changed in _changes(free, given, samples):
        yield where, {**given, **changed}, answers


def _is_mask(value: Tensor) -> bool:
    """Return true for an input of one or two different values, which are what they are."""
    if not value.numel():
        return True
    low, high = value.min(), value.max()
    return bool(((value == low) | (value == high)).all())


def _count(
    inputs: Sequence[TensorSpec],
    samples: Mapping[str, Tensor],
    limits: tuple[int, int],
    step: int,
    run: Run,
    row_seconds: float,
) -> int:
    """Return how many rows to compare, a multiple of `step`: many of small inputs, few of a slow model."""
    least, most = limits

    def taken(wanted: int) -> int:
        return min(max(-(-wanted // step) * step, least), max(most // step * step, step))

    if row_seconds > SLOW:
        return taken(FEW if row_seconds < SLOWEST else 1)
    usual = taken(ROWS)
    start = time.perf_counter()
    run({spec.name: spec.with_rows(samples[spec.name], usual) for spec in inputs})
    seconds = (time.perf_counter() - start) / usual
    values = sum(rows.one(s, samples[s.name], 0, 1).numel() for s in inputs if s.batched)
    return taken(FEW if seconds > SLOW else min(MANY, max(ROWS, SMALL // max(1, values))))


def _changes(
    free: Sequence[TensorSpec], given: Mapping[str, Tensor], samples: Mapping[str, Tensor]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield what is compared, with the inputs that differ from `given` there."""
    floats = [s for s in free if samples[s.name].is_floating_point()]
    for where, (low, high) in FACTORS.items() if floats else ():
        yield where, {s.name: _scaled(given[s.name], _by_row(s, given[s.name]), low, high) for s in floats}
    if floats:
        yield "values of zero", {s.name: torch.zeros_like(given[s.name]) for s in floats}
    yield (
        "values of their range",
        {s.name: _of_range(given[s.name], _by_row(s, given[s.name]), samples[s.name]) for s in free},
    )


def _by_row(spec: TensorSpec, value: Tensor) -> Tensor:
    """Return the index of the row of each place, of a shape that broadcasts with the value's."""
    axis = spec.batch_axis or 0
    return torch.arange(value.shape[axis]).view(-1, *[1] * (value.dim() - 1 - axis))


def _scaled(value: Tensor, row: Tensor, low: float, high: float) -> Tensor:
    """Return rows times factors between two bounds, as many below as above their middle."""
    draw = torch.rand(row.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (value * (low * (high / low) ** draw)[row]).to(value.dtype)


def _of_range(value: Tensor, row: Tensor, of: Tensor) -> Tensor:
    """Return rows of values between the smallest and the largest, of both ends mixed, and of either end, in turns."""
    low, high = (float(end) if of.is_floating_point() else int(end) for end in _ends(of))
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    share = torch.where(row % 4 == 1, share.round(), share)
    share = torch.where(row % 4 == 2, 0.0, torch.where(row % 4 == 3, 1.0, share))
    between = low + share * (high - low)
    if not of.is_floating_point():
        between = between.round().clamp(low, high)
    return between.to(value.dtype)


def _ends(of: Tensor) -> tuple[Tensor, Tensor]:
    finite = of[of.isfinite()] if of.is_floating_point() else of
    return (finite.min(), finite.max()) if finite.numel() else (torch.zeros(()), torch.zeros(()))
