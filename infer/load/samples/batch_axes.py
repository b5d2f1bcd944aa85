"""The batch axis of each input of a file that does not name it, found by growing it in the reference.

What exporters leave without a name may be rows, a time axis in front, edges of a graph. An axis is the batch where the
model runs with two rows and with three, every output has one row for each, and a row's answer is the same alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import carried_state, rows
from ...plan import Plan
from ...spec import BATCH, TensorSpec
from ..input_specs import bounds
from ..loaded_model import LoadedModel

Outputs = Mapping[str, Tensor]
Runs = Callable[[Mapping[str, Tensor]], Outputs | None]  # None where the model does not take the inputs
Make = Callable[[Sequence[TensorSpec], Mapping[str, int]], dict[str, Tensor]]
LENGTHS = (64, 128, 256, 512, 576, 100, 1000, 4000, 16_000, 1)  # tried for a symbolic size
COUNTS = (2, 3, 4, 1)  # rows that are tried
MOST_VALUES = 1 << 23  # of the inputs of one trial
MOST_TRIALS = 200
TOLERANCE = 1e-3  # of an output's root mean square


@dataclass(frozen=True)
class Axes:
    """Inputs and outputs with their batch axes, the counts of rows that ran, and the other sizes that they ran with."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    counts: tuple[int, ...]
    sizes: Mapping[str, int]


def settle(
    plan: Plan, loaded: LoadedModel, runs: Runs, make: Make, given: Mapping[str, int] | None = None
) -> None:
    """Name the batch axes of `loaded`, where its file does not.

    `make` draws inputs of the sizes that it is given; `given` are the sizes of the user's data, where there are any.
    Where nothing runs, the first guess stays.
    """
    found = _find(plan, loaded, runs, make, given or {})
    if found is None:
        return
    loaded.inputs, loaded.uncertain = found.inputs, frozenset()
    loaded.meta = {**loaded.meta, "outputs": found.outputs}
    loaded.sizes = bounds(found.inputs, plan)
    if BATCH in loaded.sizes:
        low, high = loaded.sizes[BATCH]
        loaded.sizes[BATCH] = (max(low, min(found.counts)), high) if max(found.counts) > 1 else (1, 1)


def resized(value: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """Cut or tile a tensor to these symbolic sizes."""
    for axis, name in enumerate(spec.shape):
        if isinstance(name, str) and name in sizes and value.shape[axis]:
            times = -(-sizes[name] // value.shape[axis])
            value = torch.cat([value] * times, axis).narrow(axis, 0, sizes[name])
    return value.contiguous()


def _find(plan: Plan, loaded: LoadedModel, runs: Runs, make: Make, given: Mapping[str, int]) -> Axes | None:
    loose, outputs = loaded.loose, tuple(loaded.meta["outputs"])
    sure = any(spec.batched for spec in loose)
    budget = iter(range(MOST_TRIALS))

    def run(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> Outputs | None:
        values = sum(math.prod(sizes.get(s, 1) if isinstance(s, str) else s for s in x.shape) for x in specs)
        if values > MOST_VALUES or next(budget, None) is None:
            return None
        return runs(make(specs, sizes))

    for together in _hypotheses(loose, loaded.uncertain, given):
        specs = tuple(_renamed(spec, together) for spec in loose)
        others = {size for spec in specs for size in spec.shape if isinstance(size, str)} - {BATCH}
        batched = rows.have_rows(specs)
        for sizes in _sizes(others, given, bounds(specs, plan)):
            grown = _grown(run, specs, sizes) if batched else {1: run(specs, sizes)}
            ran = {count: out for count, out in grown.items() if out is not None}
            if not ran:
                continue
            named = tuple(_output(spec, specs, sizes, ran) for spec in outputs)
            if (
                batched
                and not sure
                and len(ran) > 1
                and not _are_rows(run, make, runs, specs, named, sizes, ran)
            ):
                break
            if batched and len(ran) < 2 and not sure and max(ran) > 1:
                break
            named = carried_state.of_state_shapes(specs, named, next(iter(ran.values())))
            return Axes(specs, named, tuple(ran), sizes)
    return None


def _hypotheses(
    loose: Sequence[TensorSpec], uncertain: frozenset[str], given: Mapping[str, int]
) -> Iterator[frozenset[str]]:
    """Yield sets of symbolic sizes that may all be the batch, the most usual first; the last is none."""
    first = [s.shape[0] for s in loose if s.shape and s.shape[0] in uncertain]
    later = [size for s in loose for size in s.shape[1:] if size in uncertain and size not in first]
    every: list[list[int | str]] = [first]
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


def _grown(
    run: Callable[[Sequence[TensorSpec], Mapping[str, int]], Outputs | None],
    specs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
) -> dict[int, Outputs | None]:
    """Run with several counts of rows; where neither two nor one runs the others are not tried."""
    found = {2: run(specs, {**sizes, BATCH: 2})}
    if found[2] is None:
        found[1] = run(specs, {**sizes, BATCH: 1})
        if found[1] is None:
            return found
    return found | {n: run(specs, {**sizes, BATCH: n}) for n in COUNTS if n not in found}


def _renamed(spec: TensorSpec, together: frozenset[str]) -> TensorSpec:
    return TensorSpec(
        spec.name, spec.dtype, tuple(BATCH if size in together else size for size in spec.shape)
    )


def _output(
    spec: TensorSpec, inputs: Sequence[TensorSpec], sizes: Mapping[str, int], ran: Mapping[int, Outputs]
) -> TensorSpec:
    """Return an output with the sizes that it was seen to have: the batch where it grew with the rows."""
    shapes = {count: tuple(out[spec.name].shape) for count, out in ran.items()}
    rank = {len(shape) for shape in shapes.values()}
    if rank != {len(spec.shape)}:
        return TensorSpec(spec.name, spec.dtype, tuple(_own(spec, axis) for axis in range(len(spec.shape))))
    shape: list[int | str] = []
    for axis, declared in enumerate(spec.shape):
        seen = {count: have[axis] for count, have in shapes.items()}
        if isinstance(declared, int) and set(seen.values()) == {declared}:
            shape.append(declared)
        elif len(seen) > 1 and all(count == have for count, have in seen.items()) and BATCH not in shape:
            shape.append(BATCH)
        elif len(seen) == 1 and declared == BATCH and seen.keys() == set(seen.values()):
            shape.append(BATCH)
        elif declared in sizes and set(seen.values()) == {sizes[str(declared)]}:
            shape.append(declared)
        else:
            shape.append(_own(spec, axis))
    return TensorSpec(spec.name, spec.dtype, tuple(shape))


def _own(spec: TensorSpec, axis: int) -> int | str:
    """Return the declared size of an axis, under a name of its own where it is called the batch."""
    declared = spec.shape[axis]
    return f"{spec.keyword}_{axis}" if declared == BATCH or isinstance(declared, int) else declared


def _are_rows(
    run: Callable[[Sequence[TensorSpec], Mapping[str, int]], Outputs | None],
    make: Make,
    runs: Runs,
    specs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    ran: Mapping[int, Outputs],
) -> bool:
    """Return true where every output has a row for each of the inputs, the same in another order and among fewer."""
    if not all(spec.batched for spec in outputs):
        return False
    count = max(ran)
    whole = make(specs, {**sizes, BATCH: count})
    order = torch.arange(count - 1, -1, -1)
    turned = runs(rows.take(specs, whole, order))
    if turned is None or not _equal(rows.take(outputs, turned, order), ran[count]):
        return False
    fewer = min(ran)
    less = runs(rows.cut(specs, whole, count - fewer, count))
    return less is not None and _equal(less, rows.cut(outputs, ran[count], count - fewer, count))


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
            and float((one - other).abs().max()) > TOLERANCE * scale * math.sqrt(one.numel()) + 1e-12
        ):
            return False
    return True
