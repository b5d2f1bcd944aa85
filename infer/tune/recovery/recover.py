"""Recovery of a quantized model: its float original teaches it on rows that do not judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...graph.program import flatten
from ...reporter import Reporter
from ...spec import Finding
from ..objective import TensorRows
from ..objectives.output_objective import OutputObjective
from ..settings import TrainSettings
from ..training_loop import train
from ..training_state import TrainResult, stop_phrase
from .trainable_layers import TrainableLayers

STAGE = "recover"
HELD_OUT, MOST_HELD_OUT = 8, 32  # every eighth row chooses the best step, at most so many rows
FEWEST_ROWS = 2
RATE, BATCH, MEASURES = 1e-3, 8, 10
LOGITS_AT_ONCE = 1 << 26  # numbers of outputs of one forward pass
SHOWN = 12  # points of the curve in the report


class RecoveryObjective(OutputObjective):
    """Divergence of a student that computes in training as it will run: without dropout and batch statistics."""

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        self.model.eval()
        return super().loss(batch)


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
    """Train scales, tables, norms and biases of `student` in place; return what was found.

    `rows` are inputs by name, `names` the outputs of both models. The step with the best measure on held-out rows
    counts, also of a run that diverges; where none is better than the start, nothing changes. Checkpoints go below
    `folder`, and stay there when this is interrupted. Raises `UsageError` without enough rows, `NotUsableError` where
    nothing can be trained, and what `train` raises.
    """
    reporter = reporter or Reporter()
    training, held_out = split_rows(rows)
    layers = TrainableLayers(student)
    objective = RecoveryObjective(student, teacher, names, task)
    try:
        settings = _settings(objective, training, budget, seed)
        result = train(objective, training, held_out, settings, folder, reporter, keep_best=True)
    except BaseException:
        layers.discard()
        raise
    better = _is_better(result)
    layers.store() if better else layers.discard()
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    return [*_findings(result, objective.unit, better), _rows_finding(training, held_out)]


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


def _settings(
    objective: RecoveryObjective, training: TensorRows, budget: RecoveryBudget, seed: int
) -> TrainSettings:
    """Choose the batch and how often held-out rows are measured by one forward pass of the student."""
    batch = min(BATCH, len(training))
    with torch.no_grad():
        one = training.batch([0])
        _, terms = objective.loss(one)
        size = sum(output.numel() for output in flatten(objective.model(**one)))
    fit = max(LOGITS_AT_ONCE // max(size, 1), 1)
    steps = None if budget.terms is None else max(budget.terms // max(int(terms) * batch, 1), 1)
    return TrainSettings(
        time=budget.seconds,
        tokens=budget.terms,
        batch=batch,
        micro_batch=min(batch, fit),
        learning_rate=RATE,
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
