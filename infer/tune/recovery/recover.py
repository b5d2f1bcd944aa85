"""Recovery of a quantized model: its float original teaches it on rows that do not judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor, nn

from ...compress.packed_weight import Packed
from ...errors import UsageError
from ...reporter import Reporter
from ...spec import Finding
from ..data.rows import PaddedRows, TensorRows, is_padded_text
from ..training_state import TrainResult, stop_phrase
from .objectives import RecoveryObjective, compared_layers
from .recover_layers import LAYER_ROWS, LayersTask, num_codes, recover_layers_if_better, train_layers
from .recovery_settings import (
    CODE_BATCH,
    RecoveryBudget,
    few_steps,
    measure_model,
    no_room,
    recovery_settings,
    split_budget,
)
from .trainable_layers import TrainableLayers, original_rows

STAGE = "recover"
HELD_OUT, MOST_HELD_OUT = 8, 32  # every eighth row chooses the best step, at most so many rows
FEWEST_ROWS = 2
SHOWN = 12  # points of the curve in the report
HIDDEN = 1.0  # weight of the layers' outputs
COMPARED_WHY = "their outputs take part in the loss where the model's are few numbers a row, and no logits"


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
    by_layer: bool | None = None,
) -> list[Finding]:
    """Train scales, tables, norms and biases of `student` in place, codes too where it pays; return what was found.

    Codes are trained where the budget has steps enough: all together where the memory has room for their states, else
    layer by layer with most of the budget (`by_layer`: always, or never). `rows` are inputs by name, `names` the
    outputs of both models. The step with the best measure on held-out rows counts, also of a run that diverges; where
    none is better than the start, nothing changes. Checkpoints go below `folder`, and stay there when this is
    interrupted. Raises `UsageError` without enough rows, `NotUsableError` where nothing can be trained, and what
    `train` raises.
    """
    reporter = reporter or Reporter()
    training, held_out = split_rows(rows)
    pairs = compared_layers(student, teacher, training.batch([0]), names, task)
    objective = RecoveryObjective(student, teacher, names, task, hidden=HIDDEN, layers=pairs)
    with ExitStack() as after:
        after.callback(objective.compared.release)
        call = measure_model(objective, training)
        by_layers: list[Finding] = []
        originals: dict[Packed, Tensor] = {}
        why = no_room(num_codes(student), call.device)
        layers_budget, last_budget = split_budget(budget)
        if by_layer is None:
            by_layer = bool(why) and not few_steps(call, LAYER_ROWS, layers_budget)
        if by_layer:
            budget = last_budget
            layers_task = LayersTask(
                objective, teacher, training, held_out, call, layers_budget, folder, seed
            )
            by_layers = recover_layers_if_better(layers_task, why, reporter)
        elif not (why := why or few_steps(call, min(CODE_BATCH, len(training)), budget)):
            originals = original_rows(student, teacher)
            why = "" if originals else "no weight of the float model is that of a quantized layer"
        count = sum(each.numel() for each in originals.values())
        trained = TrainableLayers(student, originals)
        settings = recovery_settings(call, training, budget, seed, codes=count)
        result, better = train_layers(objective, trained, training, held_out, settings, folder, reporter)
    codes = by_layers or [Finding(STAGE, "codes trained", count, "codes", why)]
    compared = Finding(STAGE, "layers compared", objective.compared.count, "layers", COMPARED_WHY)
    return [*codes, *_findings(result, objective.unit, better), compared, _rows_finding(training, held_out)]


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
    parts = [{name: values[index] for name, values in rows.items()} for index in (kept, held)]
    if is_padded_text(rows):
        return PaddedRows(parts[0], CODE_BATCH), PaddedRows(parts[1], CODE_BATCH)
    return TensorRows(parts[0]), TensorRows(parts[1])


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
