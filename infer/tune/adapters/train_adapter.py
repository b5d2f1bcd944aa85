"""Training of an adapter from a source, data and options to a folder of PEFT's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import NotUsableError
from ...options import checked
from ...reporter import Reporter
from ...spec import Finding
from ..checkpoints import remove_checkpoints, whole
from ..data.packed_sequences import SequenceRows
from ..data.text_rows import text_rows
from ..language_model import TrainableLanguageModel
from ..learning_curve import TrainingReport, write_report
from ..memory.plan_run import plan_run
from ..memory.technique_table import Technique, TechniqueRow, measure_techniques, techniques
from ..objectives.next_token_objective import NextTokenObjective
from ..optimizers import trainable
from ..output_folder import publish_folder, require_free
from ..settings import TrainSettings
from ..training_environment import first_process, missing
from ..training_loop import STAGE, train
from .base_model import open_base
from .low_rank import add_adapter, save_adapter
from .settings import AdapterSettings


def train_adapter(
    settings: AdapterSettings,
    training: TrainSettings,
    output: Path,
    *,
    replace: bool = False,
    reporter: Reporter | None = None,
) -> TrainingReport:
    """Train a LoRA adapter over a frozen base and write it to the folder `output`; return the report in it.

    Checkpoints are in `OUTPUT.checkpoints` until the folder is published. Raises `UsageError` for options,
    `SourceError` for data, `BusyError` where the output exists, and what `train` raises.
    """
    settings, training, reporter = checked(settings), checked(training), reporter or Reporter()
    require_free(output, "adapter_config.json", replace=replace)
    task = _open_task(settings, training, reporter)
    objective, rows, held_out = task.objective, task.rows, task.held_out
    checkpoints = output.with_name(f"{output.name}.checkpoints")
    chosen, plan = plan_run(objective, rows, training, checkpoints, reporter)
    result = train(objective, rows, held_out, chosen, checkpoints, reporter, plan)
    report = TrainingReport.of("tune", result, settings, training, reporter.findings)
    tensors = {name: whole(each) for name, each in trainable(objective.model).items()}
    if first_process():
        with publish_folder(output) as folder:
            save_adapter(objective.model, tensors, folder)
            write_report(report, folder)
        remove_checkpoints(checkpoints)
    return report


def plan_adapter(
    settings: AdapterSettings, training: TrainSettings, reporter: Reporter | None = None
) -> list[TechniqueRow]:
    """Plan and measure one step of each technique that changes the memory of a run, which is not started.

    Raises what `train_adapter` raises before its first step.
    """
    settings, training, reporter = checked(settings), checked(training), reporter or Reporter()
    task = _open_task(settings, training, reporter)
    listed = techniques(task.objective, training)
    if task.objective.head is not None:
        listed.append(Technique("whole logits", task.objective.with_whole_logits(), training))
    return measure_techniques(task.rows, listed, reporter)


@dataclass
class _AdapterTask:
    base: TrainableLanguageModel  # keeps mapped weights open
    objective: NextTokenObjective
    rows: SequenceRows
    held_out: SequenceRows | None


def _open_task(settings: AdapterSettings, training: TrainSettings, reporter: Reporter) -> _AdapterTask:
    """Open the base and the data, and insert the adapters."""
    if why := missing():
        raise NotUsableError(why)
    base = open_base(settings.source, settings.base, reporter)
    rows, held_out = text_rows(
        base,
        settings.data,
        settings.length,
        training.seed,
        settings.held_out,
        reporter,
        packing=settings.packing,
    )
    wrapped = add_adapter(base.model, settings)
    objective = NextTokenObjective(wrapped, base.model)
    trained = sum(each.numel() for each in wrapped.parameters() if each.requires_grad)
    found = Finding(STAGE, "trained parameters", trained, "weights", f"rank {settings.lora}")
    reporter.found([*objective.findings, found])
    return _AdapterTask(base, objective, rows, held_out)
