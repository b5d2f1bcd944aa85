"""Recovery of a quantized model: its float original teaches it on rows that do not judge it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ... import device as hardware
from ...compress.packed_weight import Packed
from ...device import memory
from ...errors import UsageError
from ...graph.program import flatten
from ...reporter import Reporter
from ...spec import Finding
from ..objective import TensorRows
from ..objectives.output_objective import OutputObjective
from ..settings import TrainSettings
from ..training_loop import train
from ..training_state import TrainResult, stop_phrase
from .original_rows import original_rows
from .trainable_layers import TrainableLayers

STAGE = "recover"
HELD_OUT, MOST_HELD_OUT = 8, 32  # every eighth row chooses the best step, at most so many rows
FEWEST_ROWS = 2
RATE, BATCH, MEASURES = 1e-3, 8, 10
CODE_BATCH = 16  # rows: decoding and updating every weight costs as much as several rows of a small model
FEWEST_CODE_STEPS = 60  # fewer disturb more codes than they mend
FREE = 0.3  # share of the run in which all codes are free; they are frozen over the rest
CODE_BYTES = 29  # of a trained code: position, gradient, two moments, its best step, temporaries
BACKWARD = 2.5  # time of a step by that of both models' forward passes
LOGITS_AT_ONCE = 1 << 26  # numbers of outputs of one forward pass
SHOWN = 12  # points of the curve in the report


class RecoveryObjective(OutputObjective):
    """Divergence of a student that computes in training as it will run: without dropout and batch statistics."""

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.model.eval()
        return super().loss(batch)

    def measure(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Measure in the model's own precision, whatever the steps are computed in."""
        with torch.autocast(next(iter(batch.values())).device.type, enabled=False):
            return super().measure(batch)

    def _named(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(batch.values())).device.type
        if model is self._teacher:  # its outputs are what the student learns, to the last bit
            with torch.autocast(device, enabled=False):
                return super()._named(model, batch)
        return super()._named(model, batch)


@dataclass(frozen=True)
class RecoveryBudget:
    """Time in seconds, or terms (tokens of a language model, rows of another) to train on."""

    seconds: float | None = None
    terms: int | None = None


def recover(
    student: nn.Module,
    teacher: nn.Module,
    rows: Mapping[str, Tensor],
    names: Sequence[str],
    task: str,
    budget: RecoveryBudget,
    folder: Path,
    *,
    seed: int = 0,
    reporter: Reporter | None = None,
) -> list[Finding]:
    """Train scales, tables, norms and biases of `student` in place, codes too where it pays; return what was found.

    Codes are trained where the budget has steps enough and the memory has room for their states. `rows` are inputs by
    name, `names` the outputs of both models. The step with the best measure on held-out rows counts, also of a run
    that diverges; where none is better than the start, nothing changes. Checkpoints go below `folder`, and stay there
    when this is interrupted. Raises `UsageError` without enough rows, `NotUsableError` where nothing can be trained,
    and what `train` raises.
    """
    reporter = reporter or Reporter()
    training, held_out = split_rows(rows)
    objective = RecoveryObjective(student, teacher, names, task)
    call = _measure_call(objective, training)
    originals = original_rows(student, teacher)
    if why := _no_codes(originals, call, training, budget):
        originals = {}
    layers = TrainableLayers(student, originals)
    try:
        settings = _settings(call, training, budget, seed, codes=bool(originals))
        result = train(
            objective,
            training,
            held_out,
            settings,
            folder,
            reporter,
            keep_best=True,
            before_step=lambda share: layers.freeze(max(share - FREE, 0) / (1 - FREE)),
        )
    except BaseException:
        layers.discard()
        raise
    better = _is_better(result)
    layers.store() if better else layers.discard()
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    codes = Finding(STAGE, "codes trained", sum(rows.numel() for rows in originals.values()), "codes", why)
    return [*_findings(result, objective.unit, better), codes, _rows_finding(training, held_out)]


def split_rows(rows: Mapping[str, Tensor]) -> tuple[TensorRows, TensorRows]:
    """Split into rows that train and every eighth, which chooses the best step."""
    count = min(map(len, rows.values()), default=0)
    if count < FEWEST_ROWS:
        raise UsageError(
            f"recovery needs {FEWEST_ROWS} rows that do not judge the result, there are {count}",
            where="--recover",
            hint="Give more rows with --data: half of them judge",
        )
    held = list(range(0, count, HELD_OUT))[:MOST_HELD_OUT]
    kept = sorted(set(range(count)) - set(held))
    return tuple(TensorRows({n: v[index] for n, v in rows.items()}) for index in (kept, held))  # type: ignore[return-value]


@dataclass(frozen=True)
class _Call:
    """One row through both models: terms of its loss, numbers of outputs, seconds of both forward passes."""

    terms: int
    size: int
    seconds: float
    device: str

    def steps(self, batch: int, budget: RecoveryBudget) -> int:
        """Return about how many steps of `batch` rows the budget has, at least one."""
        if budget.terms is not None:
            return max(budget.terms // max(self.terms * batch, 1), 1)
        return max(int((budget.seconds or 0) / (self.seconds * BACKWARD * batch)), 1)


@torch.no_grad()
def _measure_call(objective: RecoveryObjective, training: TensorRows) -> _Call:
    objective.loss(training.batch([0]))  # the first call allocates and compiles
    begin = time.perf_counter()
    _, terms = objective.loss(training.batch([0]))
    seconds = time.perf_counter() - begin
    outputs = flatten(objective.model(**training.batch([0])))
    return _Call(int(terms), sum(each.numel() for each in outputs), seconds, outputs[0].device.type)


def _no_codes(
    originals: Mapping[Packed, Tensor], call: _Call, training: TensorRows, budget: RecoveryBudget
) -> str:
    """Say why codes are not trained; empty where they are."""
    if not originals:
        return "no weight of the float model is that of a quantized layer"
    steps = call.steps(min(CODE_BATCH, len(training)), budget)
    if steps < FEWEST_CODE_STEPS:
        return f"the budget has about {steps} steps, codes need {FEWEST_CODE_STEPS}"
    needed = CODE_BYTES * sum(rows.numel() for rows in originals.values())
    if needed > (available := memory.memory_available(call.device)):
        return f"their states need {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free"
    return ""


def _settings(
    call: _Call, training: TensorRows, budget: RecoveryBudget, seed: int, *, codes: bool
) -> TrainSettings:
    """Choose the batch and how often held-out rows are measured."""
    batch = min(CODE_BATCH if codes else BATCH, len(training))
    fit = max(LOGITS_AT_ONCE // max(call.size, 1), 1)
    steps = None if budget.terms is None else call.steps(batch, budget)
    slow = not codes or hardware.why_slow("bfloat16", call.device)
    return TrainSettings(
        time=budget.seconds,
        tokens=budget.terms,
        batch=batch,
        micro_batch=min(batch, fit),
        learning_rate=RATE,
        precision="float32" if slow else "bfloat16",
        schedule="linear" if codes else "cosine",
        measure_every=max(
            steps // MEASURES if steps else min(len(training) // batch // MEASURES, MEASURES), 1
        ),
        seed=seed,
    )


def _is_better(result: TrainResult) -> bool:
    first, best = result.first_held_out, result.best_held_out
    return first is not None and best is not None and best < first


def _findings(result: TrainResult, unit: str, better: bool) -> list[Finding]:
    first, best = result.first_held_out, result.best_held_out
    how = f"stopped {stop_phrase(result.stopped, result.steps)}; {result.terms} terms, {result.seconds:.0f} s"
    found = [Finding(STAGE, "before", first, unit, "on rows that neither train nor judge")]
    if better:
        found.append(Finding(STAGE, "after", best, unit, f"at step {result.best_step}; {how}"))
    else:
        found.append(Finding(STAGE, "dropped", True, why=f"no step was better than the start; {how}"))
    points = [(point.step, point.held_out) for point in result.curve if point.held_out is not None]
    shown = points[:: max(-(-len(points) // SHOWN), 1)]
    curve = ", ".join(f"{step}: {value:.4g}" for step, value in shown)
    return [*found, Finding(STAGE, "learning curve", curve or "no measure", why="held-out measure by step")]


def _rows_finding(training: TensorRows, held_out: TensorRows) -> Finding:
    why = f"{len(held_out)} more choose the best step; none of them judges the result"
    return Finding(STAGE, "training rows", len(training), "rows", why)
