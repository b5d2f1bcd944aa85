"""The batch axis of each input of a file that does not name it, found by growing it in the reference.

What exporters leave without a name may be rows, a time axis in front, edges of a graph. An axis is the batch where the
model runs with two rows and with three, every output has one row for each, and a row's answer is the same alone.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ... import carried_state, rows
from ...plan import Plan
from ...spec import BATCH, UNBOUNDED, TensorSpec
from ..input_specs import LENGTHS as LENGTH_NAMES
from ..input_specs import bounds
from ..loaded_model import LoadedModel

Outputs = Mapping[str, Tensor]
Runs = Callable[[Mapping[str, Tensor]], Outputs | None]  # None where the model does not take the inputs
Make = Callable[[Sequence[TensorSpec], Mapping[str, int]], dict[str, Tensor]]
LENGTHS = (64, 128, 256, 512, 576, 100, 1000, 4000, 16_000, 1)  # tried for a symbolic size
COUNTS = (3, 2, 1)  # rows that are tried
MORE = (8, 4, 16, 32)  # where none of them runs
STEPS = (2, 4, 8, 16, 32, 64, 3, 5, 6, 10, 12)  # of which sizes may have to be multiples
LIMIT_SECONDS = 5.0  # of the search for multiples
MOST_VALUES = 1 << 23  # of the inputs of one trial
MOST_TRIALS = 120
SLOW = 1.0  # seconds of a call, after which it is the only one
START = 10.0  # seconds that a first call may take for the start of its process, on a busy machine
TOLERANCE = 1e-3  # of an output's root mean square
ROUNDING = 2.0**-22  # of shares near 0 that are computed as .5 + .5 tanh(x / 2)


@dataclass(frozen=True)
class Axes:
    """Inputs and outputs with their batch axes, the counts of rows that ran, and the other sizes that they ran with."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    counts: tuple[int, ...]
    sizes: Mapping[str, int]


def settle(
    plan: Plan, loaded: LoadedModel, runs: Runs, make: Make, given: Mapping[str, int] | None = None
) -> LoadedModel:
    """Return the model with the batch axes named that its file does not name.

    `make` draws inputs of the sizes that it is given; `given` are the sizes of the user's data, where there are any.
    Where nothing runs, the first guess stays.
    """
    found = _find(plan, loaded, runs, make, given or {})
    if found is None:
        mixed = rows.have_rows(loaded.loose) and not all(spec.batched for spec in loaded.loose)
        if mixed and given and runs(make(loaded.loose, given)) is not None:  # a graph of nodes and edges
            inputs = rows.without(loaded.loose)
            meta = {**loaded.meta, "outputs": rows.without(loaded.loose_outputs)}
            return replace(loaded, inputs=inputs, meta=meta, sizes=bounds(inputs, plan))
        return loaded
    known = bounds(found.inputs, plan)  # a first size that is not the batch is bounded as lengths are
    sizes = {name: limits for name, limits in known.items() if name in (BATCH, *LENGTH_NAMES)}
    if BATCH in sizes:
        low, high = sizes[BATCH]
        sizes[BATCH] = (max(low, min(found.counts)), high) if max(found.counts) > 1 else (1, 1)
    multiples, limits = _limits(found, runs, make, sizes)
    settled = replace(
        loaded,
        inputs=found.inputs,
        uncertain=frozenset(),
        meta={**loaded.meta, "outputs": found.outputs},
        sizes={**sizes, **limits},
        multiples=multiples,
    )
    if not multiples:
        return settled
    each = ", ".join(f"{name} in multiples of {step}" for name, step in multiples.items())
    return settled.limited(f"sizes: {each} (found by trying: the file takes no others)")


def _limits(
    found: Axes, runs: Runs, make: Make, bounds: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Return what divides the sizes of which the next larger one does not run, and their bounds."""
    steps: dict[str, int] = {}
    limits: dict[str, tuple[int, int]] = {}
    began = time.monotonic()
    ran = {**found.sizes, BATCH: max(found.counts)}
    used = {size for spec in found.inputs for size in spec.shape}

    def runs_at(name: str, size: int) -> bool:
        sizes = {**ran, name: size}
        large = num_values(found.inputs, sizes) > MOST_VALUES or time.monotonic() - began > LIMIT_SECONDS
        return not large and runs(make(found.inputs, sizes)) is not None

    for name, have in ran.items():
        if name not in used or (name == BATCH and min(found.counts) <= COUNTS[0]):
            continue
        if time.monotonic() - began > LIMIT_SECONDS or runs_at(name, have + 1):
            continue
        step = next((n for n in STEPS if have % n == 0 and runs_at(name, have + n)), None)
        if step is not None:
            least = next(n for n in (step, 2 * step, 4 * step, have) if n >= have or runs_at(name, n))
            low, high = bounds.get(name, (1, UNBOUNDED))
            steps[name] = step
            limits[name] = max(-(-low // step) * step, min(least, have)), max(high // step * step, have)
    return steps, limits


def are_open(loaded: LoadedModel) -> bool:
    """Return true where something of the batch is to be found out: its axes, its sizes, or outputs without names."""
    if loaded.file is None or not loaded.loose:
        return False
    known = {size for spec in loaded.loose for size in spec.shape}
    unknown = {size for spec in loaded.loose_outputs for size in spec.shape if isinstance(size, str)} - known
    mixed = rows.have_rows(loaded.loose) and not rows.lie_first(loaded.loose)
    return bool(loaded.uncertain or unknown) or mixed


def _find(plan: Plan, loaded: LoadedModel, runs: Runs, make: Make, given: Mapping[str, int]) -> Axes | None:
    sure = any(spec.batched for spec in loaded.loose)
    trials = iter(range(MOST_TRIALS))
    for number, together in enumerate(_hypotheses(loaded.loose, loaded.uncertain, given)):
        first = number == 0
        specs = tuple(_renamed(spec, together) for spec in loaded.loose)
        others = {size for spec in specs for size in spec.shape if isinstance(size, str)} - {BATCH}
        for sizes in _sizes(others, given, bounds(specs, plan)):
            if next(trials, None) is None:
                return None
            tried = _Tried(runs, make, specs, sizes)
            if not tried.ran and first and rows.have_rows(specs):
                tried = _Tried(runs, make, specs, sizes, MORE)
            if not tried.ran:
                continue
            outputs = tuple(tried.named(spec) for spec in loaded.loose_outputs)
            if rows.have_rows(specs) and not sure and not tried.are_rows(outputs):
                break
            outputs = carried_state.of_state_shapes(specs, outputs, next(iter(tried.ran.values())))
            return Axes(specs, outputs, tried.counts, sizes)
    return None


class _Tried:
    """Runs of one hypothesis with three rows, and with the first two and the last of them alone.

    `ran`: outputs by count of rows; where three rows do not run together each count is tried, and where that takes long
    no other is.
    """

    def __init__(
        self,
        runs: Runs,
        make: Make,
        specs: Sequence[TensorSpec],
        sizes: Mapping[str, int],
        counts: Sequence[int] = COUNTS,
    ) -> None:
        self.specs, self.sizes = specs, sizes
        self.ran: dict[int, Outputs] = {}
        self.slow = False
        batched = rows.have_rows(specs)
        for count in counts if batched else (1,):
            wanted = {**sizes, BATCH: count}
            if num_values(specs, wanted) > MOST_VALUES * count:
                return
            began = time.monotonic()
            whole = make(specs, wanted)
            if count < COUNTS[0] and self.ran:
                whole = rows.cut(
                    specs,
                    make(specs, {**sizes, BATCH: COUNTS[0]}),
                    0 if count == 2 else 2,
                    2 if count == 2 else 3,
                )
            if (out := runs(whole)) is not None:
                self.ran[count] = out
            elif count == 2 and not self.ran:
                continue
            took = time.monotonic() - began
            if out is not None and SLOW < took < START:  # perhaps the start of its process
                began = time.monotonic()
                runs(whole)
                took = time.monotonic() - began
            self.slow = took > SLOW
            if self.slow and self.ran:
                return

    @property
    def counts(self) -> tuple[int, ...]:
        """Counts of rows that the file takes: of a slow one also those below what ran, which were not tried."""
        most = max(self.ran)
        return tuple(range(1, most + 1)) if self.slow and most <= COUNTS[0] else tuple(self.ran)

    def named(self, spec: TensorSpec) -> TensorSpec:
        """Return an output with the sizes that it was seen to have: the batch where it grew with the rows."""
        shapes = {count: tuple(out[spec.name].shape) for count, out in self.ran.items()}
        if {len(shape) for shape in shapes.values()} != {len(spec.shape)}:
            return TensorSpec(
                spec.name, spec.dtype, tuple(_own(spec, axis) for axis in range(len(spec.shape)))
            )
        shape: list[int | str] = []
        alone = len(shapes) == 1
        for axis, declared in enumerate(spec.shape):
            seen = {count: have[axis] for count, have in shapes.items()}
            grows = all(count == have for count, have in seen.items()) and BATCH not in shape
            fixed = isinstance(declared, int) and set(seen.values()) == {declared}
            if (
                grows
                and rows.have_rows(self.specs)
                and not fixed
                and (not alone or axis == 0 or declared == BATCH)
            ):
                shape.append(BATCH)
            elif fixed or (declared in self.sizes and set(seen.values()) == {self.sizes[str(declared)]}):
                shape.append(declared)
            else:
                shape.append(_own(spec, axis))
        return TensorSpec(spec.name, spec.dtype, tuple(shape))

    def are_rows(self, outputs: Sequence[TensorSpec]) -> bool:
        """Return true where every output has a row for each of the inputs, the same among fewer."""
        if min(self.ran) > COUNTS[0]:  # it takes several rows at least: what belongs to a row is tried later
            return True
        if not all(spec.batched for spec in outputs):
            return False
        if self.slow or list(self.ran) == [1]:  # of a model that takes one row alone nothing can be compared
            return True
        if set(self.ran) != set(COUNTS):
            return False
        whole = self.ran[3]
        return _equal(self.ran[2], rows.cut(outputs, whole, 0, 2)) and _equal(
            self.ran[1], rows.cut(outputs, whole, 2, 3)
        )


def num_values(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
    """Count the values of inputs of these symbolic sizes; a size that is not known is 1."""
    return sum(
        math.prod(sizes.get(size, 1) if isinstance(size, str) else size for size in x.shape) for x in specs
    )


def _hypotheses(
    loose: Sequence[TensorSpec], uncertain: frozenset[str], given: Mapping[str, int]
) -> Iterator[frozenset[str]]:
    """Yield sets of symbolic sizes that may all be the batch, the most usual first; the last is none."""
    first: list[int | str] = [s.shape[0] for s in loose if s.shape and s.shape[0] in uncertain]
    later: list[int | str] = [
        size for s in loose for size in s.shape[1:] if size in uncertain and size not in first
    ]
    every: list[list[int | str]] = [[*first]]
    every += [[*first, *more] for n in (1, 2) for more in itertools.combinations(dict.fromkeys(later), n)]
    every += [[one] for one in dict.fromkeys([*first, *later])]
    seen: set[frozenset[str]] = set()
    for names in [*every, []]:
        found = frozenset(str(name) for name in names)
        counts = {given[name] for name in found if name in given}
        if found not in seen and len(counts) < 2:
            seen.add(found)
            yield found


def _sizes(
    others: set[str], given: Mapping[str, int], bounds: Mapping[str, tuple[int, int]]
) -> Iterator[dict[str, int]]:
    """Yield numbers for the other symbolic sizes: those of the user's data, else all of one length."""
    free = others - set(given)
    known = {name: given[name] for name in others if name in given}
    for length in LENGTHS if free else (0,):
        clipped = {}
        for name in free:
            low, high = bounds.get(name, (1, length))
            clipped[name] = min(max(length, low), high)
        yield {**known, **clipped}


def _renamed(spec: TensorSpec, together: frozenset[str]) -> TensorSpec:
    return TensorSpec(
        spec.name, spec.dtype, tuple(BATCH if size in together else size for size in spec.shape)
    )


def _own(spec: TensorSpec, axis: int) -> int | str:
    """Return the declared size of an axis, under a name of its own where it is called the batch."""
    declared = spec.shape[axis]
    return f"{spec.keyword}_{axis}" if declared == BATCH or isinstance(declared, int) else declared


def _equal(got: Outputs, expected: Outputs) -> bool:
    for name, value in expected.items():
        if got[name].shape != value.shape:
            return False
        if not value.is_floating_point():
            wrong = int((got[name] != value).sum())
            if wrong > value.numel() // 100:
                return False
            continue
        one, other = value.double().nan_to_num(), got[name].double().nan_to_num()
        scale = float(one.square().mean().sqrt()) if one.numel() else 0.0
        if (
            one.numel()
            and float((one - other).abs().max()) > TOLERANCE * scale * math.sqrt(one.numel()) + ROUNDING
        ):
            return False
    return True
