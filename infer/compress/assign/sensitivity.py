"""Sensitivity: the effect of each format of each layer on the output, one layer packed at a time, on real inputs.

The effect is the mean KL(float || changed) per row for logits, otherwise the squared relative error of the outputs.
Both are second order in the weight error and independent errors add, so that the effects of an assignment sum up,
nearly (Hubara et al. 2021, arXiv 2006.10518): what is built on the sum is measured afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ... import rows
from ...fidelity import OutputDivergence
from ...spec import TensorSpec
from .. import Candidates, Weight
from .partial_forward import Replay

SECONDS = 120.0
MOST_ROWS = 32
Progress = Callable[[int, int, str], None]


@dataclass
class LayerSensitivity:
    """Weight with its `effect` and `size` (bytes) by format; `name` is its first layer."""

    name: str
    names: tuple[str, ...]
    num_weights: int
    size: dict[str, int]
    effect: dict[str, float] = field(default_factory=dict)
    weight_error: dict[str, float] = field(default_factory=dict)
    estimated: set[str] = field(default_factory=set)

    def bits(self, format: str) -> float:
        return self.size[format] * 8 / self.num_weights


@dataclass
class Sensitivity:
    """Measured layers, with the number of rows, the time taken, and what was estimated for lack of time."""

    layers: list[LayerSensitivity]
    unit: str
    rows: int
    seconds: float
    num_measured: int
    num_estimated: int
    allowed: float = SECONDS

    def summary(self) -> str:
        text = f"{self.num_measured} runs on {self.rows} rows in {self.seconds:.1f} s, one layer packed at a time"
        if self.num_estimated:
            text += (
                f"; {self.num_estimated} more estimated from weight errors: {self.allowed:.0f} s were over"
            )
        return text


def measure(
    model: nn.Module,
    candidates: Candidates,
    formats: Mapping[str, Sequence[str]],
    samples: Mapping[str, Tensor],
    *,
    inputs: Sequence[TensorSpec],
    names: Sequence[str],
    task: str,
    float_bytes: int = 4,
    progress: Progress | None = None,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Sensitivity:
    """Pack each weight in each of its `formats` (by first layer name, the reference first) and run the model.

    Of the rows of `samples`, which fit `inputs`, as many are used as `seconds` allow, at most `MOST_ROWS`. The first
    format of every layer is always measured; others are estimated once time is over. `names` are those of the outputs.
    """
    begin = clock()
    weights = [w for w in candidates.weights if w.name in formats]
    jobs = _jobs(weights, formats)
    layers = {w.name: _layer(w, float_bytes) for w in weights}
    replay, effect, used = _prepare(
        model, weights, (inputs, samples), names, task, seconds / max(len(jobs), 1), clock
    )
    for done, (weight, format) in enumerate(jobs):
        if progress:
            progress(done, len(jobs), f"{weight.name} {format}")
        layer, packing = layers[weight.name], candidates.packing(weight, format)
        layer.size[format], layer.weight_error[format] = packing.num_bytes, packing.error.relative
        if clock() - begin > seconds and format != formats[weight.name][0]:
            layer.effect[format] = _estimate(layer, formats[weight.name][0], format)
            layer.estimated.add(format)
            continue
        with candidates.in_place({weight.name: format}) as changed:
            layer.effect[format] = effect.of(replay.run(changed))
    estimated = sum(len(layer.estimated) for layer in layers.values())
    taken = clock() - begin
    return Sensitivity(
        list(layers.values()), effect.unit, used, taken, len(jobs) - estimated, estimated, seconds
    )


def _jobs(weights: Sequence[Weight], formats: Mapping[str, Sequence[str]]) -> list[tuple[Weight, str]]:
    """Order the measurements: the reference format of every layer, then the second of each, and so on."""
    longest = max((len(formats[w.name]) for w in weights), default=0)
    return [(w, formats[w.name][i]) for i in range(longest) for w in weights if i < len(formats[w.name])]


def _layer(weight: Weight, float_bytes: int) -> LayerSensitivity:
    names = tuple(name for site in weight.sites for name in site.names)
    count = weight.tensor.numel()
    return LayerSensitivity(
        weight.name, names, count, {"float": count * float_bytes}, {"float": 0.0}, {"float": 0.0}
    )


def _estimate(layer: LayerSensitivity, reference: str, format: str) -> float:
    """Estimate an effect to second order: it grows with the square of the weight error."""
    known = layer.weight_error[reference]
    if known == 0:
        return layer.effect[reference]
    return layer.effect[reference] * (layer.weight_error[format] / known) ** 2


def _prepare(
    model: nn.Module,
    weights: Sequence[Weight],
    rows_of: tuple[Sequence[TensorSpec], Mapping[str, Tensor]],
    names: Sequence[str],
    task: str,
    allowed: float,
    clock: Callable[[], float],
) -> tuple[Replay, OutputDivergence, int]:
    """Build a replay with as many rows as take at most `allowed` seconds per run."""
    count = min(rows.count(*rows_of), MOST_ROWS)
    layers = [site.layer for weight in weights for site in weight.sites]
    while True:
        inputs = rows.cut(*rows_of, 0, count)
        replay = Replay(model, layers, inputs)
        begin = clock()
        replay.run(layers)
        effect = OutputDivergence(names, replay.outputs, inputs, task)
        effect.of(replay.outputs)
        taken = clock() - begin
        if taken <= allowed or count == 1:
            return replay, effect, count
        count = max(1, min(count // 2, math.floor(count * allowed / taken)))
