"""Format assignment of one run: the decision for each layer, and the inputs of the decisions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from ... import compress, library_errors, rows
from ...errors import NotUsableError, UsageError
from ...fidelity import Comparison, OutputDivergence, drop
from ...graph.program import flatten
from ...graph.typical_inputs import typical_inputs
from ...plan import Plan
from ...reporter import Reporter
from ...spec import DTYPES, DecidedBy, Finding, LayerChoice, TensorSpec
from .. import Candidates, PackingCache, QuantizationResult, Stats, Weight
from ..layer_overrides import FLOAT
from . import calibration_method, sensitivity
from .calibration_rows import more_batches
from .format_order import fallback_formats, larger_formats
from .layer_calls import CallCounter
from .layer_timing import LayerTimer, TimeFunction
from .lowered_layers import SharedFloatLayers
from .partial_forward import Replay

STAGE = "layers"
ROWS = 8  # of a calibration batch


@dataclass
class CalibrationSet:
    """Float model and calibration rows for format decisions, disjoint from the rows that judge the result."""

    model: nn.Module | None  # None: not a torch model, or its weights are streamed from disk
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    task: str
    samples: Mapping[str, Tensor]  # what a call looks like
    calibration: Mapping[str, Tensor]
    steps: bool = False  # a language model that runs as a step over a KV cache
    head: nn.Module | None = None  # what computes its logits
    training: Mapping[str, Tensor] = field(default_factory=dict)  # more texts, for statistics and recovery

    def batches(self) -> list[dict[str, Tensor]]:
        """Return the calibration rows in batches; raise `UsageError` when there are none."""
        if not self.calibration:
            held = rows.count(self.inputs, self.samples)
            raise UsageError(
                f"no rows to calibrate with: the {held} given judge the result, and the two may not overlap",
                where="--data",
                hint="Give more rows, or add calibration_inputs() to the file that builds the model",
            )
        count = rows.count(self.inputs, self.calibration)
        return [rows.cut(self.inputs, self.calibration, i, i + ROWS) for i in range(0, count, ROWS)]

    def statistics_batches(self, recover: str) -> list[dict[str, Tensor]]:
        """Return the batches whose statistics calibrate: more of the texts, where there are any."""
        batches = self.batches()
        if not self.training or self.model is None or not rows.have_rows(self.inputs):
            return batches
        return more_batches(self.model, self.training, self.calibration, self.task, recover, ROWS)

    def call(self, batch: int) -> dict[str, Tensor]:
        """Return the inputs of a typical call with so many rows."""
        return typical_inputs(self.inputs, self.samples, {}, batch)


@dataclass(frozen=True)
class Decision:
    """Format of a layer, with its origin and reason for display."""

    format: str
    by: DecidedBy
    why: str = ""


def collect_statistics(plan: Plan, known: CalibrationSet, reporter: Reporter) -> Mapping[str, Stats] | None:
    """Collect the calibration statistics of every layer; None when no format needs them and no rows are available."""
    used = {plan.quant, *plan.layers.values()} - {FLOAT, "none"}
    needed = any(compress.needs_stats(plan.with_(quant=format)) for format in used)
    way, why = calibration_method.choose(plan, known.model is not None, bool(known.calibration))
    if not used or known.model is None or (way == "none" and not needed):
        reporter.found([Finding("calibrate", "method", "none", why=why)] if used else [])
        return None
    batches = known.statistics_batches(plan.recover)
    begin = time.perf_counter()
    seen, way, why = calibration_method.collect(
        plan, known.model, batches, known.outputs, known.task, way, why
    )
    count = sum(rows.count(known.inputs, batch) for batch in batches)
    why = f"{why}; {count} rows, {time.perf_counter() - begin:.1f} s"
    reporter.found([Finding("calibrate", "method", way, why=why)])
    reporter.found(compress.coverage(known.model, seen, batches))
    return seen


@dataclass
class Assignment:
    """State of the assignment: `decisions` by layer name; undecided layers get `plan.quant`."""

    plan: Plan
    calibration_set: CalibrationSet
    reporter: Reporter
    stats: Mapping[str, Stats] | None = None  # of `collect_statistics`
    decisions: dict[str, Decision] = field(default_factory=dict)
    slow: dict[str, dict[str, str]] = field(default_factory=dict)  # weight → format that loses to float → why
    packing_cache: PackingCache = field(default_factory=PackingCache)
    float_layers: SharedFloatLayers | None = None  # open for several assignments, which close none of them
    calls: CallCounter = field(default_factory=CallCounter)  # of the Linears at each batch size
    timer: LayerTimer | None = None  # with times of layers that were taken before the formats are decided
    layer_seconds: dict[int, float] = field(default_factory=dict)  # of all timed layers, by batch size
    layer_gain: dict[int, float] = field(default_factory=dict)  # saved over float; {}: not all were timed
    measured: sensitivity.Sensitivity | None = None
    risen: set[str] = field(default_factory=set)
    num_rounds: int = 0
    time: TimeFunction | None = None  # how dispatch times a layer; None: on the backend of the plan

    @property
    def model(self) -> nn.Module:
        if self.calibration_set.model is None:
            raise NotUsableError(
                "formats can be chosen layer by layer only for a torch model whose weights are in memory",
                hint="Leave out --bits and --max-drop, or use --load meta",
            )
        return self.calibration_set.model

    @property
    def formats(self) -> dict[str, str]:
        """Formats of the decided layers, by layer name."""
        return {name: decision.format for name, decision in self.decisions.items()}

    @property
    def budgeted(self) -> bool:
        return self.plan.bits is not None or self.plan.max_drop is not None

    @cached_property
    def candidates(self) -> Candidates:
        formats = dict.fromkeys([*larger_formats(self.plan), *fallback_formats(self.plan)])
        return Candidates(self.model, self.plan, list(formats), self.stats or {}, self.packing_cache)

    def free(self) -> list[Weight]:
        """List the undecided weights."""
        known = self.candidates.assigned(self.formats)
        return [weight for weight in self.candidates.weights if weight.name not in known]

    def now(self) -> dict[str, str]:
        """Return the current format of every weight, by first layer name."""
        known = self.candidates.assigned(self.formats)
        own = self.plan.quant
        return {
            w.name: known.get(w.name) or (own if own in self.candidates.accepted(w) else FLOAT)
            for w in self.candidates.weights
        }

    def options(self, weight: Weight, formats: Sequence[str]) -> list[str]:
        """List the formats that a weight accepts and that are not slower than float on this machine."""
        slow = self.slow.get(weight.name, {})
        return [f for f in self.candidates.accepted(weight) if f in formats and f not in slow]

    def set(self, weight: Weight, format: str, by: DecidedBy, why: str) -> None:
        for name in (name for site in weight.sites for name in site.names):
            self.decisions[name] = Decision(format, by, why)

    @property
    def float_bytes(self) -> int:
        return DTYPES.get(self.plan.dtype, torch.float32).itemsize

    def measure(
        self, formats: Mapping[str, Sequence[str]], seconds: float = sensitivity.SECONDS
    ) -> sensitivity.Sensitivity:
        """Measure the effect of each format of each weight, by first layer name, on as many rows as fit `seconds`; the
        result is kept.
        """
        self.calibration_set.batches()
        self.reporter.step(
            "measure", f"the effect of {sum(map(len, formats.values()))} single changes on the output"
        )
        self.measured = sensitivity.measure(
            self.model,
            self.candidates,
            formats,
            self.calibration_set.calibration,
            inputs=self.calibration_set.inputs,
            names=self.calibration_set.outputs,
            task=self.calibration_set.task,
            float_bytes=self.float_bytes,
            progress=self.reporter.progress,
            seconds=seconds,
        )
        said = self.measured.summary()
        self.reporter.found([Finding(STAGE, "sensitivity", self.measured.num_measured, "runs", said)])
        return self.measured

    def effect_together(self, formats: Mapping[str, str]) -> float:
        """Measure the effect of a whole assignment, on as many rows as the single effects."""
        most = self.measured.rows if self.measured else sensitivity.MOST_ROWS
        known = self.calibration_set
        inputs = rows.cut(known.inputs, known.calibration, 0, most)
        layers = [site.layer for weight in self.candidates.weights for site in weight.sites]
        replay = Replay(self.model, layers, inputs)
        effect = OutputDivergence(
            self.calibration_set.outputs, replay.outputs, inputs, self.calibration_set.task
        )
        with self.candidates.in_place(formats) as changed:
            return effect.of(replay.run(changed))

    @torch.no_grad()
    def drop_together(self, formats: Mapping[str, str]) -> float:
        """Measure the drop that --max-drop limits, of a whole assignment, on the calibration rows."""
        comparison = Comparison(self.calibration_set.task)
        for batch in self.calibration_set.batches():
            with library_errors.float_model_errors():
                expected = self._run(batch)
            with self.candidates.in_place(formats):
                comparison.add(expected, self._run(batch), batch)
        return drop(comparison.metrics(), self.calibration_set.task)

    def _run(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.calibration_set.outputs, flatten(self.model(**batch)), strict=True))

    def reasons(self, done: QuantizationResult) -> dict[str, str]:
        """Return the reasons of float layers by name: the assignment's decision, else the format's refusal."""
        kept = {name: decision.why for name, decision in self.decisions.items() if decision.format == FLOAT}
        return {**done.refused, **kept}

    def requested_float(self, pins: Mapping[str, str]) -> frozenset[str]:
        """Return the layers that are float because of a pin or of the user's budget."""
        pinned = {name for name, format in pins.items() if format == FLOAT}
        chosen = {name for name, d in self.decisions.items() if d.by == "budget" and d.format == FLOAT}
        return frozenset(pinned | chosen)

    def choices(self, module: nn.Module, done: QuantizationResult) -> tuple[LayerChoice, ...]:
        """Return one row per layer of the quantized `module` that a format could take, in order."""
        errors = {layer.name: layer.weight_error for layer in done.layers}
        measured = self.measured.layers if self.measured else []
        effects = {name: layer.effect for layer in measured for name in layer.names}
        rows = []
        for name, format, bits in compress.formats_of(module):
            refused = "" if name in errors else done.refused.get(name, "")
            own = self.decisions.get(name, Decision(format, "refused" if refused else ""))
            rows.append(
                LayerChoice(
                    name, format, bits, errors.get(name), effects.get(name, {}), own.why or refused, own.by
                )
            )
        return tuple(rows)
