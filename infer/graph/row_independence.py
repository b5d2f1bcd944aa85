"""Trial of which requests may share a batch: the name "batch" of a size proves nothing.

Rows of different clients meet in one batch only where a row's answer is the same whatever the other rows are, how many
they are, and where it stands among them, and where each row of the inputs has one row in every output. Rows are padded
to one length only where padding changes no answer either. A batch of the same size with other neighbours runs the same
kernels, so that there any difference beyond the last bits is one row seeing another; batches of different sizes round
differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InferError
from ..library_errors import first_sentence
from ..rows import are_joinable, count, joined, one, take
from ..spec import BATCH, UNBOUNDED, Joins, TensorSpec, text_padding
from .typical_inputs import MASK, row_lengths

ROWS, FEW = 8, 4  # in the batch that the others are compared with; of a slow model
SLOW = 0.05  # seconds of one row, from which on a model is tried on few
LARGEST_SECONDS = 5.0  # that the largest batch may take
LOUD = 1e3  # times the value of an honest row: neighbours that shift a mean or a scale that rows share
LARGEST_VALUES = 1 << 22  # of one input or output of the largest batch, so that memory does not decide
CHUNK = 1 << 20  # values widened to float64 at a time
Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Tolerance:
    """Difference that is no dependence, relative to the root mean square of a value over the rows, and of its output.

    `share`: of the values, that may differ more, as where rounding flips the choice of a maximum. `choices`: integers
    that may differ: trees whose votes are equal choose by the order in which a library adds them.
    """

    value: float
    output: float
    share: float = 0.0
    choices: int = 0

    def differs(self, expected: Tensor, got: Tensor) -> bool:
        """Return true where rows [n, …] are not the expected ones."""
        if expected.shape != got.shape or expected.dtype != got.dtype:
            return True
        if not expected.numel():
            return False
        if not expected.is_floating_point():
            return self._too_many(int(torch.count_nonzero(expected != got)) - self.choices, expected)
        pairs = [
            value.reshape(len(value), -1).split(max(CHUNK // len(value), 1), 1) for value in (expected, got)
        ]
        squares = sum(float(_squares(wanted).sum()) for wanted in pairs[0])
        whole = math.sqrt(squares / expected.numel())
        wrong = sum(
            self._count_wrong(wanted, computed, whole) for wanted, computed in zip(*pairs, strict=True)
        )
        return self._too_many(wrong, expected)

    def _count_wrong(self, expected: Tensor, got: Tensor, whole: float) -> int:
        wanted, computed = expected.double(), got.double()
        by_value = _squares(expected).mean(0, keepdim=True).sqrt()
        near = (computed - wanted).abs() <= self.value * by_value + self.output * whole
        same = (wanted == computed) | (wanted.isnan() & computed.isnan())
        return int(torch.count_nonzero(~torch.where(wanted.isfinite() & computed.isfinite(), near, same)))

    def _too_many(self, wrong: int, values: Tensor) -> bool:
        return wrong > int(self.share * values.numel())


def _squares(value: Tensor) -> Tensor:
    return torch.where(value.isfinite(), value, 0.0).double().square()


@dataclass(frozen=True)
class Tolerances:
    """`neighbours`: at one batch size, with other neighbours; `sizes`: at another size, place or length."""

    neighbours: Tolerance
    sizes: Tolerance


REFERENCE = Tolerances(Tolerance(2e-5, 1e-6), Tolerance(1e-3, 1e-4, 1e-4, choices=1))


def of_class(relative_error: float) -> Tolerances:
    """Return the tolerances of an optimized form that may differ from its original by this relative error."""
    allowed = Tolerance(relative_error, relative_error, 1e-3)
    return Tolerances(allowed, replace(allowed, choices=1))


@dataclass(frozen=True)
class Joining:
    """Requests that may share a batch, and why not all; `why` is empty where all may."""

    joins: Joins
    why: str = ""

    @property
    def limitation(self) -> str:
        """Sentence for the verdict, where not all requests may share a batch."""
        if self.joins == "none":
            return f"rows of a batch depend on each other: requests are not joined ({self.why})"
        return f"padding changes answers: only requests of equal lengths are joined ({self.why})"


def joining(
    run: Run,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    samples: Mapping[str, Tensor],
    sizes: Mapping[str, tuple[int, int]],
    tolerances: Tolerances = REFERENCE,
    *,
    row_seconds: float = 0.0,
) -> Joining:
    """Try on `run` which requests may share a batch. `row_seconds`: what a row is known to take; a first call may be
    answered from memory.

    `samples`: rows that the model takes. Where inputs or an output have none, nothing is tried: none are joined.
    """
    if not are_joinable(inputs, outputs):
        return Joining("none")
    trial = _Trial(run, inputs, outputs, samples, sizes, tolerances, row_seconds)
    try:
        if why := trial.dependence():
            return Joining("none", why)
        why = trial.change_by_padding()
    except (InferError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - those of torch and of ONNX Runtime share no other base
        return Joining("none", f"it fails on {trial.rows} rows together: {first_sentence(error)}")
    return Joining("equal", why) if why else Joining("padded")


class _Trial:
    def __init__(
        self,
        run: Run,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        samples: Mapping[str, Tensor],
        sizes: Mapping[str, tuple[int, int]],
        tolerances: Tolerances,
        row_seconds: float,
    ) -> None:
        self._model, self.inputs, self.sizes, self.tolerances = run, inputs, sizes, tolerances
        self.row_seconds = row_seconds
        self.outputs = [spec.name for spec in outputs]
        self._axes = {spec.name: spec.batch_axis or 0 for spec in outputs}
        self.samples = samples
        self.low, self.high = sizes.get(BATCH, (1, 1))
        self.seconds, self.rows = 0.0, 0  # of the last run

    def dependence(self) -> str:
        """Return how rows depend on each other; "" where they do not."""
        fewest = max(self.low, 1)
        alone = self._run(distinct_rows(self.samples, self.inputs, fewest))
        if why := self._other_count(alone, fewest):
            return why
        if self.high < 2:
            return ""
        values = ROWS * max(value.numel() // fewest for value in alone.values())
        quick = max(self.seconds / fewest, self.row_seconds) < SLOW and values <= LARGEST_VALUES
        count = max(min(ROWS if quick else FEW, self.high), fewest)
        rows = distinct_rows(self.samples, self.inputs, count)
        whole = self._run(rows)
        if why := self._other_count(whole, count):
            return why
        checks = [
            self._compare(alone, _take(whole, torch.arange(fewest)), self.tolerances.sizes),
            self._among_fewer(rows, whole, count),
            self._in_other_order(rows, whole, count),
            self._among_strangers(rows, whole, count),
            self._far_in_the_batch(rows, whole, count),
        ]
        return next((why for check in checks for why in check), "")

    def _among_fewer(self, rows: Rows, whole: Rows, count: int) -> Iterator[str]:
        size = min(max(self.low, 3), count - 1)
        if size >= self.low:
            kept = torch.arange(count - size, count)
            yield from self._compare(
                self._run(take(self.inputs, rows, kept)), _take(whole, kept), self.tolerances.sizes
            )

    def _in_other_order(self, rows: Rows, whole: Rows, count: int) -> Iterator[str]:
        """Compare rows in reverse order, half of them copies of one."""
        order = torch.arange(count - 1, -1, -1)
        order[count // 2 :] = order[count // 2].item()
        got = self._run(take(self.inputs, rows, order))
        yield from self._compare(got, _take(whole, order), self.tolerances.sizes)

    def _among_strangers(self, rows: Rows, whole: Rows, count: int) -> Iterator[str]:
        """Compare rows that keep their places while their neighbours change.

        Where the model refuses strange ones, they are copies of a row that it takes.
        """
        for kept in (torch.arange(0, count, 2), torch.arange(1, count, 2)):
            others = torch.tensor([i for i in range(count) if i not in set(kept.tolist())])
            for strangers in _strangers(rows, self.inputs, others, int(kept[0])):
                try:
                    got = self._run(strangers)
                except Exception:  # noqa: BLE001 - of torch and of ONNX Runtime, which share no base
                    order = torch.arange(count)
                    order[others] = int(kept[0])
                    got = self._run(take(self.inputs, rows, order))
                if why := self._other_count(got, count):
                    yield why
                    return
                yield from self._compare(_take(got, kept), _take(whole, kept), self.tolerances.neighbours)

    def _far_in_the_batch(self, rows: Rows, whole: Rows, count: int) -> Iterator[str]:
        values = max(value.numel() // count for value in (*rows.values(), *whole.values())) * self.high
        if (
            self.high <= count
            or values > LARGEST_VALUES
            or max(self.seconds / count, self.row_seconds) * self.high > LARGEST_SECONDS
        ):
            return
        order = torch.arange(self.high) % count
        got = self._run(take(self.inputs, rows, order))
        if why := self._other_count(got, self.high):
            yield why
            return
        for start in range(0, self.high - count + 1, count):
            part = torch.arange(start, start + count)
            yield from self._compare(_take(got, part), whole, self.tolerances.sizes)

    def change_by_padding(self) -> str:
        """Return what padding a row of token ids to the length of a longer neighbour changes; "" where nothing."""
        padding = text_padding(0)
        lengths = {size for spec in self.inputs for size in spec.shape[1:] if isinstance(size, str)}
        if len(lengths) != 1 or not all(spec.name in padding for spec in self.inputs):
            return ""
        (name,) = lengths
        low, high = self.sizes.get(name, (1, UNBOUNDED))
        rows = distinct_rows(self.samples, self.inputs, max(min(FEW, self.high), self.low))
        longest = int(row_lengths(rows[MASK]).max()) if MASK in rows else _length(rows, self.inputs, name)
        length = max(low, min(longest, high) // 2, 1)
        if length >= high:
            return ""
        padding = text_padding(_pad_id(self.samples))
        short = _cut(rows, self.inputs, name, length)
        padded = {
            spec.name: _padded(short[spec.name], spec, name, min(high, length * 2), padding[spec.name])
            for spec in self.inputs
        }
        wanted, got = self._run(short), self._run(padded)
        real = short[MASK] != 0 if MASK in short else None
        for output in wanted:
            expected, other = wanted[output], got[output]
            axes = [axis for axis in range(1, expected.dim()) if expected.shape[axis] != other.shape[axis]]
            for axis in axes:
                other = other.narrow(axis, 0, min(expected.shape[axis], other.shape[axis]))
            if expected.shape != other.shape:
                return f"{output} has another shape after padding"
            if axes == [1] and real is not None and real.shape == expected.shape[:2]:
                expected, other = expected[real], other[real]
            if self.tolerances.sizes.differs(expected, other):
                return f"{output} of a row changes when the row is padded"
        return ""

    def _run(self, rows: Mapping[str, Tensor]) -> Rows:
        self.rows = count(self.inputs, rows)
        began = time.perf_counter()
        outputs = self._model({name: value.contiguous() for name, value in rows.items()})
        self.seconds = time.perf_counter() - began
        kept = {name: outputs[name].detach().cpu() for name in self.outputs if name in outputs}
        return {
            name: value.movedim(self._axes[name], 0) if value.dim() > self._axes[name] else value.new_zeros(0)
            for name, value in kept.items()
        }

    def _other_count(self, outputs: Rows, count: int) -> str:
        for name, value in outputs.items():
            if not value.dim() or len(value) != count:
                rows = len(value) if value.dim() else "no"
                return f"{name} has {rows} rows for {count} of the inputs"
        return ""

    def _compare(self, got: Rows, expected: Rows, tolerance: Tolerance) -> Iterator[str]:
        for name, value in expected.items():
            if tolerance.differs(value, got[name]):
                yield f"{name} of a row changes with the other rows of its batch"


def distinct_rows(samples: Mapping[str, Tensor], specs: Sequence[TensorSpec], count: int) -> Rows:
    """Return the first `count` rows of batched samples; where there are fewer, others made by shifting their values."""
    rows: Rows = {}
    for spec in specs:
        value, axis = samples[spec.name], spec.batch_axis
        parts = [value]
        while axis is not None and len(parts) * value.shape[axis] < count:
            shift = len(parts)
            others = value.dim() > 1 and axis != value.dim() - 1
            moved = value.roll(shift, dims=-1) if others and spec.name != MASK else value
            parts.append(moved * (1 + shift / 7) if value.is_floating_point() else moved)
        rows[spec.name] = one(spec, joined(spec, parts), 0, count)
    return rows


def _strangers(rows: Rows, specs: Sequence[TensorSpec], at: Tensor, source: int) -> Iterator[Rows]:
    """Yield rows whose neighbours, those at `at`, are loud, silent, copies and, in the last, NaN.

    Integers stay among the values that the samples have, which a table of embeddings takes.
    """
    kinds: list[Callable[[Tensor, int], Tensor]] = [
        lambda value, i: value[i] * LOUD if value.is_floating_point() else value.amax(0),
        lambda value, i: torch.zeros_like(value[i]) if value.is_floating_point() else value.amin(0),
        lambda value, _: value[source],
    ]
    others = {name: value.clone() for name, value in rows.items()}
    axes = {spec.name: spec.batch_axis for spec in specs if spec.batch_axis is not None}
    for place, index in enumerate(at.tolist()):
        for name, axis in axes.items():
            value = rows[name].movedim(axis, 0)
            others[name].movedim(axis, 0)[index] = kinds[place % len(kinds)](_ordered(value), index)
    yield others
    if any(rows[name].is_floating_point() for name in axes):
        yield {
            name: value.index_fill(axes[name], at, float("nan"))
            if value.is_floating_point() and name in axes
            else value
            for name, value in others.items()
        }


def _ordered(value: Tensor) -> Tensor:
    return value.to(torch.uint8) if value.dtype == torch.bool else value


def _take(rows: Mapping[str, Tensor], order: Tensor) -> Rows:
    return {name: value[order] for name, value in rows.items()}


def _pad_id(samples: Mapping[str, Tensor]) -> int:
    """Return the token id under a mask of 0, which the samples are padded with; 0 where none is."""
    mask, ids = samples.get(MASK), samples.get("input_ids")
    if mask is None or ids is None or mask.shape != ids.shape or bool((mask != 0).all()):
        return 0
    return int(ids[mask == 0][-1])


def _length(rows: Rows, specs: Sequence[TensorSpec], name: str) -> int:
    return next(rows[spec.name].shape[spec.shape.index(name)] for spec in specs if name in spec.shape)


def _cut(rows: Rows, specs: Sequence[TensorSpec], name: str, length: int) -> Rows:
    return {
        spec.name: rows[spec.name].narrow(spec.shape.index(name), 0, length)
        if name in spec.shape
        else rows[spec.name]
        for spec in specs
    }


def _padded(value: Tensor, spec: TensorSpec, name: str, length: int, pad: int) -> Tensor:
    if name not in spec.shape:
        return value
    axis = spec.shape.index(name)
    more = list(value.shape)
    more[axis] = length - value.shape[axis]
    return torch.cat([value, value.new_full(more, pad)], axis)
