"""Error of each slice of an output in units of its own, and of each row: what one number for a whole tensor hides.

A *slice* is one index of an axis that is not the rows' (a channel, a column, the first token), or one of a few ranges
of indices where the axis is long. Its error is relative to its deviation from its mean over the rows at each place, so
that neither a constant nor a slice of larger values hides a loss. Positions of a text are samples like its rows: there
the mean is over both, since what follows a first token hardly depends on it. Rounding of the output's own type is no
error: a column of 10^5 that varies by one has no more digits. Sums are float64, of a size that does not grow with the
rows' values. Nor is what lies two float32 significands below
the largest slice, as 1e-23 beside 1; nine decades are judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_SLICES = 256  # of an axis; a longer one is cut into `RANGES`
RANGES = 16
MOST_PLACES = (
    1 << 20
)  # of a row, of which sums are kept over the batches; of larger ones the deviation is within a batch
CHUNK = 1 << 18  # values widened to float64 at a time
ROUNDING = 16  # times epsilon and magnitude: what sums in another order legitimately differ by
FEWEST_ROWS = 8  # whose deviation says something; slices of fewer are measured against their magnitude
FEWEST_VALUES = 8  # of one row in one slice, to be judged alone
QUIET_SHARE = 0.05  # of the deviation of the liveliest among slices of shares (0 to 1), which have one unit
HIDDEN = (-1e4, -65504.0, -1e9, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min)  # masks
Part = tuple[slice, ...]
Axis = tuple[int, int]  # an axis of an output and its size


@dataclass(frozen=True)
class Worst:
    """The largest relative error of a slice or row, and where it is."""

    error: float
    place: str


@dataclass
class _Axis:
    """Sums of the slices of one axis; `cells` are those of each row in each slice."""

    axis: int
    size: int
    group: Tensor  # slice of each index
    count: int
    raw: Tensor = field(init=False)  # squares about the origin, less the part of the mean: see `_settle`
    error: Tensor = field(init=False)
    values: Tensor = field(init=False)
    freedom: Tensor = field(init=False)
    magnitude: Tensor = field(init=False)
    shares: Tensor = field(init=False)
    deviation: Tensor = field(init=False)
    cells: list[Tensor] = field(default_factory=list)  # [3, rows, slices]: error, square, values

    def __post_init__(self) -> None:
        for name in ("raw", "error", "values", "freedom", "magnitude", "deviation"):
            setattr(self, name, torch.zeros(self.count, dtype=torch.float64))
        self.shares = torch.ones(self.count, dtype=torch.bool)

    def words(self, first: int, last: int) -> str:
        """Name the slices `first` to `last`."""
        low = int((self.group == first).nonzero()[0])
        high = int((self.group == last).nonzero()[-1])
        index = f"{low}" if low == high else f"{low}..{high}"
        where = ""
        if self.size > RANGES:
            part = [int(3 * place / self.size) for place in (low, high)]
            if part[0] == part[1]:
                where = f" of {self.size}, {('its beginning', 'its middle', 'its end')[part[0]]}"
        return f"axis {self.axis} index {index}{where}"


class SliceSums:
    """Sums of one output [rows, ...] of one shape; call `add` for each batch, then `worst_slice` and `worst_row`."""

    def __init__(
        self, first: Tensor, units: Mapping[Axis, Tensor] | None = None, *, of_tokens: bool = False
    ) -> None:
        """Start with the shape of the first batch.

        `units`: scales of slices that are known from other rows, the least that they are judged in. `of_tokens`: the
        output is [rows, positions, ...] of texts; its deviation is from the mean over rows and positions of a batch.
        """
        self._shape, self._units, self._of_tokens = first.shape[1:], units or {}, of_tokens
        self._blocks = list(_parts(self._shape, max(1, CHUNK // max(len(first), 1))))
        largest = max((_largest(first[(slice(None), *part)]) for part in self._blocks), default=0.0)
        self._factor = 1.0 if 1e-100 < largest < 1e100 else 2.0 ** -math.frexp(largest)[1]
        self._epsilon = epsilon(first)
        self._axes = [_axis(axis, size) for axis, size in enumerate(self._shape, 1)]
        self._keeps = math.prod(self._shape) <= MOST_PLACES
        self._samples = self._most = 0  # `_most`: samples that a deviation is of
        self._origin: Tensor | None = None
        if self._keeps:
            self._sum = torch.zeros(self._shape, dtype=torch.float64)
            self._seen = torch.zeros(self._shape, dtype=torch.float64)
        if self._keeps and not of_tokens and len(first) >= FEWEST_ROWS // 2:
            self._origin = torch.zeros(self._shape, dtype=torch.float64)
            for part in self._blocks:
                values = first[(slice(None), *part)].double().nan_to_num(0.0, 0.0, 0.0)
                self._origin[part] = values.median(0).values * self._factor

    def add(self, reference: Tensor, got: Tensor, real: Tensor | None) -> None:
        """Add a batch; `real` [rows, places] is false where a row has padding."""
        rows = len(reference)
        cells = [torch.zeros(3, rows, axis.count, dtype=torch.float64) for axis in self._axes]
        if self._of_tokens and (self._origin is None or not self._keeps):
            self._origin = self._mean_token(reference, real)
        for part in self._blocks:
            taken = (slice(None), *part)
            known = None if real is None else real[taken[:2]].reshape(rows, -1, *[1] * (len(self._shape) - 1))
            self._add_part(part, reference[taken], got[taken], known, cells)
        for axis, cell in zip(self._axes, cells, strict=True):
            axis.cells.append(cell)
        samples = rows
        if self._of_tokens:
            samples = rows * self._shape[0] if real is None else int(real.sum())
        self._samples += samples
        self._most = self._samples if self._keeps else max(self._most, samples)

    def _mean_token(self, reference: Tensor, real: Tensor | None) -> Tensor:
        """Return the mean over rows and positions, [1, ...], of what is finite and real."""
        total = torch.zeros(self._shape[1:], dtype=torch.float64)
        seen = torch.zeros(self._shape[1:], dtype=torch.float64)
        for row, values in enumerate(reference):
            kept = values if real is None else values[real[row]]
            plain = kept.sum(0, dtype=torch.float64)
            if bool(plain.isfinite().all()):  # and so is each value
                total += plain
                seen += len(kept)
                continue
            total += kept.nan_to_num(0.0, 0.0, 0.0).sum(0, dtype=torch.float64)
            seen += kept.isfinite().sum(0)
        return (total * self._factor / seen.clamp(min=1)).expand(self._shape)

    def _add_part(
        self, part: Part, expected: Tensor, got: Tensor, real: Tensor | None, cells: list[Tensor]
    ) -> None:
        expected, got = self._scaled(expected), self._scaled(got)
        known = self._known(expected, got, real)
        if self._origin is not None:
            origin = self._origin[part]
        elif not self._keeps and len(expected) >= FEWEST_ROWS // 2:
            origin = (expected if known is None else expected.where(known, 0.0)).median(0).values
        else:
            origin = torch.zeros_like(expected[0])
        moved, difference = expected - origin, got.sub_(expected)
        if known is None:
            counts = moved.new_ones(()).expand(moved.shape)
            total, seen = moved.sum(0), moved.new_full(moved.shape[1:], float(len(moved)))
        else:
            moved, difference = moved.where(known, 0.0), difference.where(known, 0.0)
            total, seen, counts = moved.sum(0), known.sum(0, dtype=torch.float64), known.double()
        squares = (difference.square_(), moved.square_(), counts)
        inside = None
        if any(bool(axis.shares.any()) for axis in self._axes):
            inside = (expected >= 0) & (expected <= self._factor)
            inside = (inside if known is None else inside | ~known).all(0)
        for axis, cell in zip(self._axes, cells, strict=True):
            others = tuple(d for d in range(1, expected.dim()) if d != axis.axis)
            group = axis.group[part[axis.axis - 1]]
            for index, values in enumerate(squares):
                cell[index].index_add_(1, group, values.sum(others) if others else values)
            if inside is not None:
                outside = (~inside).movedim(axis.axis - 1, 0).reshape(len(group), -1).any(1)
                axis.shares[group[outside]] = False
        if self._keeps:
            self._sum[part] += total
            self._seen[part] += seen
        else:
            self._settle(part, origin, total, seen)

    def _known(self, expected: Tensor, got: Tensor, real: Tensor | None) -> Tensor | None:
        """Return where values are finite, real and not hidden by a mask; None where all are."""
        plain = real is None and expected.numel() > 0
        plain = plain and (self._factor != 1 or bool(expected.amin() > HIDDEN[0]))
        if plain and bool((expected.sum() + got.sum()).isfinite()):  # and so is each value
            return None
        known = expected.isfinite().logical_and_(got.isfinite())
        if self._factor == 1 and bool((expected <= HIDDEN[0]).any()):
            hidden = torch.isin(expected, torch.tensor(HIDDEN, dtype=torch.float64)) & (got < 0.9 * HIDDEN[0])
            known &= ~hidden
        if real is not None:
            known = known & real
        return None if bool(known.all()) else known

    def _scaled(self, values: Tensor) -> Tensor:
        """Return a copy in float64, times a power of two where the output is far from 1."""
        copy = values.to(torch.float64, copy=True)
        return copy if self._factor == 1 else copy.mul_(self._factor)

    def _settle(self, part: Part, origin: Tensor, total: Tensor, seen: Tensor) -> None:
        """Take the mean of each place, or of all tokens, off the squares of its slices; find degrees of freedom."""
        mean, freedom = total / seen.clamp(min=1), (seen - 1).clamp(min=0)
        if self._of_tokens:  # what is not kept lies about the mean of its batch
            mean = total.sum(0) / seen.sum(0).clamp(min=1) if self._keeps else torch.zeros_like(total)
            freedom = seen
        mean_part = 2 * mean * total - seen * mean.square()
        size = 2 * origin * total + seen * origin.square()
        for axis in self._axes:
            group = axis.group[part[axis.axis - 1]]
            for sums, values in (
                (axis.raw, -mean_part),
                (axis.freedom, freedom),
                (axis.magnitude, size),
            ):
                sums.index_add_(0, group, values.movedim(axis.axis - 1, 0).reshape(len(group), -1).sum(1))

    def units(self) -> dict[Axis, Tensor]:
        """Return the scales of the slices of each axis."""
        return {(axis.axis, axis.size): scale for axis, _, scale, _ in self._settled()}

    def _settled(self) -> Iterator[tuple[_Axis, Tensor, Tensor, Tensor]]:
        """Yield each axis with its cells, and the scale and rounding of its slices."""
        if self._keeps:
            for axis in self._axes:
                axis.raw.zero_(), axis.freedom.zero_(), axis.magnitude.zero_()
            origin = self._origin if self._origin is not None else torch.zeros(self._shape).double()
            self._settle((slice(None),) * len(self._shape), origin, self._sum, self._seen)
        for axis in self._axes:
            cells = torch.cat(axis.cells, 1)
            axis.error, square, axis.values = cells.sum(1)
            variance = ((axis.raw + square) / axis.freedom.clamp(min=1)).clamp(min=0)
            magnitude = ((axis.magnitude + square) / axis.values.clamp(min=1)).clamp(min=0).sqrt()
            hidden = self._epsilon * float(magnitude.max())
            rounding = (ROUNDING * magnitude).clamp(min=hidden) * self._epsilon
            axis.deviation = variance.sqrt()
            yield axis, cells, self._scale(axis, axis.deviation, magnitude, rounding), rounding

    def _scale(self, axis: _Axis, deviation: Tensor, magnitude: Tensor, rounding: Tensor) -> Tensor:
        """Return what errors are relative to: the deviation, or what stands for it where it says nothing."""
        known = self._units.get((axis.axis, axis.size))
        if known is not None:
            return torch.maximum(known, deviation)
        if self._most < FEWEST_ROWS:
            own = torch.maximum(deviation, magnitude)
            of_others = [float(u.median()) for (place, _), u in self._units.items() if place == axis.axis]
            return own.clamp(min=max(of_others, default=0.0))  # of a few values nearly zero tells nothing
        usual = magnitude.sort().values[(len(magnitude) - 1) // 2]
        constant = (deviation <= rounding) | (deviation <= ROUNDING / 4 * self._epsilon * usual)
        lively = deviation[~constant]
        other = lively.median() if len(lively) else torch.zeros((), dtype=torch.float64)
        scale = deviation.where(~constant, torch.maximum(magnitude, other))
        if bool(axis.shares.any()):
            liveliest = deviation[axis.shares].max()
            scale = torch.maximum(scale, QUIET_SHARE * liveliest).where(axis.shares, scale)
        return scale

    @property
    def is_constant(self) -> bool:
        """Return whether no value differs from row to row by more than rounding, among enough rows to tell."""
        return self._most >= FEWEST_ROWS and all(
            bool((axis.deviation <= rounding).all()) for axis, _, _, rounding in self._settled()
        )

    def worst(self) -> tuple[Worst, Worst]:
        """Return the worst slice and the worst row."""
        worst_slice, worst_row = Worst(0.0, ""), Worst(0.0, "")
        for axis, cells, scale, rounding in self._settled():
            errors = (axis.error / axis.values.clamp(min=1)).sqrt()
            relative = _relative((errors - rounding).clamp(min=0), scale)
            first = last = int(relative.argmax())
            if float(relative[first]) > worst_slice.error:
                near = relative >= relative[first] / 2
                while first and near[first - 1]:
                    first -= 1
                while last + 1 < axis.count and near[last + 1]:
                    last += 1
                worst_slice = Worst(float(relative.max()), axis.words(first, last))
            worst_row = max(worst_row, *self._rows_of(axis, cells, scale, rounding), key=lambda w: w.error)
        return worst_slice, worst_row

    def _rows_of(self, axis: _Axis, cells: Tensor, scale: Tensor, rounding: Tensor) -> Iterator[Worst]:
        """Yield the worst row over all slices of an axis in their units, and the worst slice of one row.

        Rows whose deviation is below that of the usual row are measured against the usual one.
        """
        values = cells[2].clamp(min=1)
        error = ((cells[0] / values).sqrt() - rounding).clamp(min=0)
        own = (cells[1] / values).sqrt()
        live = cells[2] > 0
        units = scale.where(scale > 0, 1.0)
        counted = live.sum(1).clamp(min=1)
        pair = [((side / units).where(live, 0.0).square().sum(1) / counted).sqrt() for side in (error, own)]
        quiet = QUIET_SHARE if bool(axis.shares.all()) else 0.0
        usual = _usual(pair[1][live.any(1)], 1.0)
        relative = _relative(pair[0], pair[1].clamp(min=max(usual, quiet)))
        row = int(relative.argmax())
        yield Worst(float(relative[row]), f"row {row}")
        if float(values.max()) < FEWEST_VALUES or axis.count < 2:
            return
        enough = live & (values >= FEWEST_VALUES)
        usual_of = torch.stack(
            [own[:, i][live[:, i]].median() if live[:, i].any() else scale[i] for i in range(axis.count)]
        )
        usual_of = usual_of.where(usual_of > rounding, scale)
        floor = torch.maximum(usual_of, QUIET_SHARE * scale.where(axis.shares, 0.0))
        alone = _relative(error, torch.maximum(own, floor)).where(enough, 0.0)
        row, index = divmod(int(alone.argmax()), axis.count)
        yield Worst(float(alone[row, index]), f"row {row}, {axis.words(index, index)}")


def epsilon(values: Tensor) -> float:
    """Return the relative rounding of the arithmetic that made an output.

    float64 that float32 can hold is taken for a cast at the end of float32 arithmetic.
    """
    if values.dtype == torch.float64 and not torch.equal(
        values.float().double().nan_to_num(), values.nan_to_num()
    ):
        return torch.finfo(torch.float64).eps
    return max(torch.finfo(values.dtype).eps, torch.finfo(torch.float32).eps)


def _axis(axis: int, size: int) -> _Axis:
    count = size if size <= MOST_SLICES else RANGES
    return _Axis(axis, size, torch.arange(size) * count // max(size, 1), count)


def _parts(shape: tuple[int, ...], most: int) -> Iterator[Part]:
    """Cut a row into blocks of at most `most` values, or one."""
    steps = []
    for size in reversed(shape):
        steps.append(max(1, min(size, most)))
        most //= steps[-1]
    ranges = [range(0, size, step) for size, step in zip(shape, reversed(steps), strict=True)]
    for begins in itertools.product(*ranges):
        yield tuple(slice(begin, begin + r.step) for begin, r in zip(begins, ranges, strict=True))


def _largest(values: Tensor) -> float:
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def _usual(own: Tensor, otherwise: float) -> float:
    """Return the median, or a substitute where most rows do not deviate at all."""
    middle = float(own.median()) if len(own) else 0.0
    return middle if middle > 0 else otherwise


def _relative(error: Tensor, scale: Tensor) -> Tensor:
    return torch.where(error > 0, error / scale, torch.zeros_like(error)).nan_to_num(posinf=math.inf)
