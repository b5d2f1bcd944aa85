"""Time of all layers of a format alone, measured before anything is quantized, at few batch sizes.

A search that knows a faster trial ends one here whose layers can't come near it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from .. import Weight
from .assignment import Assignment
from .format_order import fallback_formats
from .layer_timing import LayerTime, LayerTimer
from .slow_layers import WeightTimings, is_timed


@dataclass(frozen=True)
class LayerSums:
    """Least seconds of all layers that were timed alone, by batch size, and the most that they gain over float.

    `gain` is empty where it has no bound: not all layers were timed.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    gain: dict[int, float] = field(default_factory=dict)


def layers_alone(assignment: Assignment, batches: Sequence[int]) -> LayerSums:
    """Time the layers of `plan.quant` at these batch sizes; the times are kept for `decide`.

    Empty where `decide` times no layer, for language models that run as a step, and with pins.
    """
    plan, calibration = assignment.plan, assignment.calibration_set
    if plan.quant == "none" or assignment.budgeted or plan.layers or calibration.model is None:
        return LayerSums()
    if not is_timed(plan) or calibration.steps or not batches:
        return LayerSums()
    weights = [w for w in assignment.free() if plan.quant in assignment.candidates.accepted(w)]
    layers = [site.layer for weight in weights for site in weight.sites]
    calls = assignment.calls.count(calibration.model, layers, batches, calibration.call)
    assignment.timer = LayerTimer(plan, assignment.time, floats=assignment.float_layers)
    timings = WeightTimings(assignment, assignment.timer, calls)
    bounded, sums = True, [LayerTime(0.0, 0.0, 1.0, 1.0, 1.0) for _ in batches]
    for weight in weights:
        own = _least_times(timings, weight)
        bounded &= bool(own) or all(isinstance(site.layer, nn.Embedding) for site in weight.sites)
        sums = [LayerTime.total([(1, a), (1, b)]) for a, b in zip(sums, own, strict=True)] if own else sums
    gain = {size: t.float_seconds - t.seconds for size, t in zip(batches, sums, strict=True)}
    seconds = {size: t.seconds for size, t in zip(batches, sums, strict=True) if t.seconds}
    return LayerSums(seconds, gain if bounded and seconds else {})


def _least_times(timings: WeightTimings, weight: Weight) -> list[LayerTime]:
    """Return the least that a weight's Linears may take by batch size, whatever `decide` does with one that loses: it
    stays, becomes float, or takes a format to fall back to. Empty where it has none.
    """
    plan, accepted = timings.assignment.plan, timings.assignment.candidates.accepted(weight)
    tried = [timings.times_alone(weight, plan.quant)]
    if any(t.loses for t in tried[0]) and not timings.decoded_if_slower(weight, plan.quant):
        others = [name for name in fallback_formats(plan) if name in accepted and name != plan.quant]
        tried += [timings.times_alone(weight, name) for name in others]
    return [
        LayerTime(
            min(*(t.seconds for t in column), column[0].float_seconds), column[0].float_seconds, 1.0, 1.0, 1.0
        )
        for column in zip(*tried, strict=True)
    ]
