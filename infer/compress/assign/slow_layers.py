"""Layers slower than float on this machine: moved to a larger format, or kept float.

A format that computes faster (int8) has to win in each layer. A weight-only format saves memory, so that it stays where
all layers together are as fast as float; where they are not, those that lose most leave it, as few as will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ... import compress
from ...errors import GateError
from ...latency import WORKLOAD
from ...plan import Plan
from ...spec import Finding
from .. import Weight, is_weight_only
from ..layer_kinds import is_linear
from ..layer_overrides import FLOAT
from . import layer_timing
from .assignment import Assignment
from .format_order import fallback_formats, larger_formats
from .layer_calls import LayerCalls, count_step_calls
from .layer_timing import LayerTime


@dataclass
class WeightTimings:
    """Times of the layers of `assignment`, each at its own numbers of rows."""

    assignment: Assignment
    clock: layer_timing.LayerTimer
    uses: LayerCalls

    def layer_times(self, weight: Weight, format: str) -> list[LayerTime]:
        """Return the time of a weight's Linears in a format per batch size; empty when it has none, and where lowering
        decodes it if that is faster.

        Only Linear layers are timed. An Embedding is a lookup, whose time is nothing beside a product; convolutions
        hand their int8 results on to the next, so that one alone, which converts at both ends, says little.
        """
        return [] if self.decoded_if_slower(weight, format) else self.times_alone(weight, format)

    def times_alone(self, weight: Weight, format: str) -> list[LayerTime]:
        """Return these times also where lowering decodes the weight if that is faster."""
        layers = [s.layer for s in weight.sites if is_linear(s.layer) and id(s.layer) in self.uses]
        return [
            LayerTime.total(
                [
                    (calls, self.clock.timed(self.assignment.candidates, weight, format, shape))
                    for layer in layers
                    for shape, calls in self.uses[id(layer)][i].items()
                ]
            )
            for i in range(len(self.uses[id(layers[0])]) if layers else 0)
        ]

    def decoded_if_slower(self, weight: Weight, format: str) -> bool:
        """Return whether lowering measures which is faster, the format or decoded weights, for the weight's Linears."""
        has_times = any(is_linear(s.layer) and id(s.layer) in self.uses for s in weight.sites)
        if self.assignment.calibration_set.steps or not has_times:
            return False
        form = self.clock.form(self.assignment.candidates, weight, format)
        return form is not None and form.decoded_if_slower

    def slowness(self, weight: Weight, format: str) -> str | None:
        """Describe how much slower than float a format is at its worst batch size; None when it is not slower."""
        found = [(t.ratio, i, t) for i, t in enumerate(self.layer_times(weight, format)) if t.loses]
        if not found:
            return None
        _, index, timed = max(found)
        return f"{format} takes {timed.describe(self.describe_rows(weight, index))}"

    def describe_rows(self, weight: Weight, index: int) -> str:
        """Describe the timed rows: `at 64 rows`, or the workload of a language model."""
        batch = self.assignment.plan.batches[index]
        if self.assignment.calibration_set.steps:
            return f"over {WORKLOAD} at batch {batch}"
        rows = {
            shape[0] for s in weight.sites for shape in self.uses.get(id(s.layer), [{}] * (index + 1))[index]
        }
        return f"at {', '.join(map(str, sorted(rows)))} rows"


def is_timed(plan: Plan) -> bool:
    """Return whether layers are timed: a layer alone has no codes of the source, so that its real form can't be."""
    return bool(plan.batches) and not plan.allow_slower and not compress.carries_codes(plan)


def note_slow(assignment: Assignment, weights: Sequence[Weight], format: str) -> None:
    """Time a format that layers may take after all, and note in `assignment.slow` those that are slower in it."""
    weights = [w for w in weights if format in assignment.candidates.accepted(w)]
    if not is_timed(assignment.plan) or not any(is_linear(s.layer) for w in weights for s in w.sites):
        return
    clock = layer_timing.LayerTimer(assignment.plan, assignment.time, floats=assignment.float_layers)
    timings = WeightTimings(assignment, clock, _layer_calls(assignment, weights))
    try:
        for weight in weights:
            if reason := timings.slowness(weight, format):
                assignment.slow.setdefault(weight.name, {})[format] = reason
    finally:
        clock.close()
    clock.save()


def drop_slow(assignment: Assignment, free: Sequence[Weight]) -> None:
    """Replace `plan.quant` for layers that are slower with it; raise `GateError` when every layer is."""
    plan = assignment.plan
    assignment.reporter.step("dispatch", "each layer shape against float")
    clock = assignment.timer or layer_timing.LayerTimer(plan, assignment.time, floats=assignment.float_layers)
    timings = WeightTimings(assignment, clock, _layer_calls(assignment, free))
    whole = not assignment.budgeted and is_weight_only(plan)
    try:
        slowness, total = _together(timings, free) if whole else (_one_by_one(timings, free), [])
        if not assignment.budgeted and not assignment.calibration_set.steps:
            _set_layer_seconds(timings, free)
    finally:
        clock.close()
    clock.save()
    use = f", {WORKLOAD}" if assignment.calibration_set.steps else ""
    why = f"{clock.summary()}; on {clock.backend}, at batch {', '.join(map(str, plan.batches))}{use}"
    left = {name: assignment.decisions[name] for name in slowness}
    each = [Finding("dispatch", name, decision.format, why=decision.why) for name, decision in left.items()]
    assignment.reporter.found(
        [Finding("dispatch", "layer timings", len(clock.used), "timings", why), *total, *each]
    )
    if slowness and set(assignment.now().values()) <= {FLOAT}:
        raise GateError(
            f"refused, slower: no layer of this model is faster than float on this machine: {slowness[0]}: "
            f"{left[slowness[0]].why}",
            hint="Nothing was published. --allow-slower keeps the smaller model, --quant none the float one",
        )


def _layer_calls(assignment: Assignment, free: Sequence[Weight]) -> LayerCalls:
    layers = [site.layer for weight in free for site in weight.sites]
    if assignment.calibration_set.steps:
        return count_step_calls(
            assignment.model,
            layers,
            assignment.calibration_set.call(1),
            assignment.calibration_set.head,
            assignment.plan.batches,
        )
    call = assignment.calibration_set.call
    return assignment.calls.count(assignment.model, layers, assignment.plan.batches, call)


def _one_by_one(timings: WeightTimings, free: Sequence[Weight]) -> list[str]:
    """Move each slow weight to the next larger format that is not slow, else float; return their names."""
    assignment, plan, slowness = timings.assignment, timings.assignment.plan, list[str]()
    wanted = dict.fromkeys(
        [*larger_formats(plan), *fallback_formats(plan)]
        if assignment.budgeted
        else [plan.quant, *fallback_formats(plan)]
    )
    for done, weight in enumerate(free):
        assignment.reporter.progress(done, len(free), weight.name)
        if not assignment.budgeted and plan.quant not in assignment.candidates.accepted(weight):
            continue
        kept = _not_slower(
            timings, weight, [f for f in assignment.candidates.accepted(weight) if f in wanted]
        )
        if weight.name in assignment.slow and not assignment.budgeted:
            _keep_first(assignment, weight, kept)
            slowness.append(weight.name)
    return slowness


def _not_slower(timings: WeightTimings, weight: Weight, formats: Sequence[str]) -> list[str]:
    """Return the formats that are not slower than float, and note the others; without a budget only the first."""
    kept = []
    for format in formats:
        if reason := timings.slowness(weight, format):
            timings.assignment.slow.setdefault(weight.name, {})[format] = reason
            continue
        kept.append(format)
        if not timings.assignment.budgeted:
            break
    return kept


def _keep_first(assignment: Assignment, weight: Weight, kept: Sequence[str]) -> None:
    taken, why = kept[0] if kept else FLOAT, "; ".join(assignment.slow[weight.name].values())
    assignment.set(weight, taken, "speed", why)


def _together(timings: WeightTimings, free: Sequence[Weight]) -> tuple[list[str], list[Finding]]:
    """Move the slowest weights to other formats until all layers together are not slower than float.

    Returns the names of those that left it, and what the layers take together.
    """
    assignment, plan, slowness = timings.assignment, timings.assignment.plan, list[str]()
    now: dict[str, list[LayerTime]] = {}
    weights = {w.name: w for w in free if plan.quant in assignment.candidates.accepted(w)}
    for done, (name, weight) in enumerate(weights.items()):
        assignment.reporter.progress(done, len(weights), name)
        if timed := timings.layer_times(weight, plan.quant):
            now[name] = timed
    staying = list(now)
    while staying and (index := _slowest_batch(now)) is not None:
        worst = max(staying, key=lambda name: now[name][index].seconds - now[name][index].float_seconds)
        staying.remove(worst)
        weight = weights[worst]
        assignment.slow.setdefault(worst, {})[plan.quant] = (
            f"{plan.quant} takes {now[worst][index].describe(timings.describe_rows(weight, index))}"
        )
        rest = [f for f in fallback_formats(plan) if f in assignment.candidates.accepted(weight)]
        kept = _not_slower(timings, weight, rest)
        now[worst] = timings.layer_times(weight, kept[0]) if kept else [_float_time(t) for t in now[worst]]
        _keep_first(assignment, weight, kept)
        slowness.append(worst)
    return slowness, _summary(assignment, now)


def _slowest_batch(now: Mapping[str, Sequence[LayerTime]]) -> int | None:
    """Return the plan's batch index at which all layers together are slowest; None when at none."""
    totals = _totals(now)
    index = max(range(len(totals)), key=lambda i: totals[i].ratio)
    return index if totals[index].loses else None


def _totals(now: Mapping[str, Sequence[LayerTime]]) -> list[LayerTime]:
    return [LayerTime.total([(1, timed) for timed in column]) for column in zip(*now.values(), strict=True)]


def _set_layer_seconds(timings: WeightTimings, free: Sequence[Weight]) -> None:
    """Set the seconds of all timed layers in the formats decided for them, by batch size, and what they gain."""
    assignment, now, complete = timings.assignment, {}, True
    formats = assignment.now()
    for weight in free:
        format = formats[weight.name]
        if assignment.plan.quant not in assignment.candidates.accepted(weight):
            continue
        times = timings.layer_times(weight, assignment.plan.quant if format == FLOAT else format)
        if times:
            now[weight.name] = [_float_time(t) for t in times] if format == FLOAT else times
        elif format != FLOAT:
            complete = complete and all(isinstance(site.layer, nn.Embedding) for site in weight.sites)
    if not now:
        return
    totals = dict(zip(assignment.plan.batches, _totals(now), strict=False))
    assignment.layer_seconds = {batch: total.seconds for batch, total in totals.items()}
    if complete:
        assignment.layer_gain = {batch: t.float_seconds - t.seconds for batch, t in totals.items()}


def _float_time(timed: LayerTime) -> LayerTime:
    return LayerTime(timed.float_seconds, timed.float_seconds, 1.0, 1.0, 1.0)


def _summary(assignment: Assignment, now: Mapping[str, Sequence[LayerTime]]) -> list[Finding]:
    """Report the time of all layers together, and the layers kept although each is slower by itself."""
    if not now:
        return []
    totals = zip(assignment.plan.batches, _totals(now), strict=True)
    said = ", ".join(f"{t.ratio:.2f}x of float at batch {batch}" for batch, t in totals)
    slow = [name for name, timed in now.items() if any(t.loses for t in timed)]
    kept = f"; slower alone, kept for the memory: {', '.join(slow[:4])}" if slow else ""
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    return [Finding("dispatch", "layers together", len(now), "layers", f"{said}{kept}{more}")]
