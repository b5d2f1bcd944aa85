"""Quantization by infer of a reference model: uniform formats, and mixed precision within bytes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from bench.quality.reference_models import ReferenceModel
from infer import compress
from infer.compress.assign import budget, format_order, sensitivity
from infer.plan import Plan

UNIFORM = ("cluster:2", "cluster:3", "cluster:4", "nf4", "nf4:16", "int4", "int4:16", "cluster:6")
SMALLEST = "cluster:2"
FLOAT, FLOAT_BYTES = "float", 4
PREFIX = "model."  # of the transformers model in the reference module
SECONDS = 240.0  # for measuring the effects of one model


class InferQuantization:
    """Calibrated quantization of the weights of a scope; what no format covers counts as float32.

    Packed weights and measured effects are those of all weights; `of_scope` shares them.
    """

    scope = "all"

    def __init__(
        self, model: ReferenceModel, stats: Mapping[str, compress.Stats], say: Callable[[str], None]
    ) -> None:
        self.model, self._say = model, say
        self.plan = Plan(
            source=str(model.folder), quant=SMALLEST, backend="eager", device="cpu", dtype="float32"
        )  # fmt: skip
        self.mixable = format_order.larger_formats(self.plan)
        formats = list(dict.fromkeys([*self.mixable, *UNIFORM]))
        self.candidates = compress.Candidates(
            model.module, self.plan, formats, stats, compress.PackingCache()
        )
        self.weights = self.candidates.weights

    def of_scope(self, scope: str) -> Self:
        """Return the same quantization of the weights of a scope; the others stay float."""
        made = copy.copy(self)
        counted = {f"{PREFIX}{name}" for name in self.model.matrices(scope)}
        made.scope, made.weights = scope, [w for w in self.weights if counted & set(w.names)]
        names = {w.name for w in made.weights}
        made.effects = [layer for layer in self.effects if layer.name in names]
        return made

    def uniform(self, format: str) -> dict[str, str]:
        """Return the format of each weight, by first layer name; float where it is refused."""
        return {w.name: format if format in self.candidates.accepted(w) else FLOAT for w in self.weights}

    def within(self, num_bytes: int) -> dict[str, str] | None:
        """Return the formats of least sum of measured effects within so many bytes; None where none fits."""
        left = num_bytes - self._uncovered()
        count = sum(layer.num_weights for layer in self.effects)
        front = budget.front(self.effects)
        if front.smallest > left:
            return None
        return budget.for_bits(self.effects, left * 8 / count).formats

    @cached_property
    def effects(self) -> list[sensitivity.LayerSensitivity]:
        """Measured effect of each format of each weight on the output, on calibration rows."""
        wanted = {w.name: [f for f in self.candidates.accepted(w) if f in self.mixable] for w in self.weights}
        begin = time.monotonic()
        found = sensitivity.measure(
            self.model.module, self.candidates, wanted, self.model.calibration,
            names=[self.model.output], task=self.model.task, seconds=SECONDS,
        )  # fmt: skip
        self._say(f"  {found.summary()}, {time.monotonic() - begin:.0f} s")
        return found.layers

    def num_bytes(self, formats: Mapping[str, str]) -> int:
        """Return the bytes of all weights of the scope."""
        sizes = (
            w.tensor.numel() * FLOAT_BYTES
            if formats[w.name] == FLOAT
            else self.candidates.packing(w, formats[w.name]).num_bytes
            for w in self.weights
        )
        return sum(sizes) + self._uncovered()

    def _uncovered(self) -> int:
        covered = sum(w.tensor.numel() for w in self.weights)
        return (self.model.count(self.scope) - covered) * FLOAT_BYTES

    @torch.no_grad()
    def judge(self, formats: Mapping[str, str]) -> dict[str, float]:
        """Return the figures on held-out rows, computed by the operators that an artifact captures."""
        expected = self.model.expected
        with self.candidates.in_place(formats):
            return self.model.compare(expected, self.model.outputs())


def square_means(stats: Mapping[str, compress.Stats]) -> dict[str, Tensor]:
    """Return the mean squares of the inputs by transformers' layer names: what an importance matrix holds."""
    return {name.removeprefix(PREFIX): found.square_mean for name, found in stats.items()}
