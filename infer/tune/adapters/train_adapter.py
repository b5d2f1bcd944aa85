"""Training of an adapter from a source, data and options to a folder of PEFT's format."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import BusyError, NotUsableError
from ...options import checked
from ...paths import writing
from ...reporter import Reporter
from ...spec import Finding
from ..checkpoints import remove_checkpoints, whole
from ..data.packed_sequences import SequenceRows, packing_fault
from ..data.sequences import read_text_data, split_documents
from ..learning_curve import TrainingReport, write_report
from ..memory.plan_run import plan_run
from ..memory.technique_table import Technique, TechniqueRow, measure_techniques, techniques
from ..next_token_objective import NextTokenObjective
from ..optimizers import trainable
from ..settings import TrainSettings
from ..training_environment import first_process, missing
from ..training_loop import STAGE, train
from .base_model import BaseModel, open_base
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
    _check_output(output, replace)
    task = _open_task(settings, training, reporter)
    objective, rows, held_out = task.objective, task.rows, task.held_out
    checkpoints = output.with_name(f"{output.name}.checkpoints")
    chosen, plan = plan_run(objective, rows, training, checkpoints, reporter)
    result = train(objective, rows, held_out, chosen, checkpoints, reporter, plan)
    report = TrainingReport.of(result, settings, training, reporter.findings)
    tensors = {name: whole(each) for name, each in trainable(objective.model).items()}
    if first_process():
        with _staging(output) as folder:
            save_adapter(objective.model, tensors, folder)
            write_report(report, folder)
            if output.exists():
                shutil.rmtree(output)
            folder.rename(output)
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
    base: BaseModel  # keeps mapped weights open
    objective: NextTokenObjective
    rows: SequenceRows
    held_out: SequenceRows | None


def _open_task(settings: AdapterSettings, training: TrainSettings, reporter: Reporter) -> _AdapterTask:
    """Open the base and the data, and insert the adapters."""
    if why := missing():
        raise NotUsableError(why)
    base = open_base(settings.source, settings.base, reporter)
    rows, held_out = _rows(base, settings, training, reporter)
    wrapped = add_adapter(base.model, settings)
    objective = NextTokenObjective(wrapped, base.model)
    trained = sum(each.numel() for each in wrapped.parameters() if each.requires_grad)
    found = Finding(STAGE, "trained parameters", trained, "weights", f"rank {settings.lora}")
    reporter.found([*objective.findings, found])
    return _AdapterTask(base, objective, rows, held_out)


def _rows(
    base: BaseModel, settings: AdapterSettings, training: TrainSettings, reporter: Reporter
) -> tuple[SequenceRows, SequenceRows | None]:
    """Read the data, set some of it aside, and say what came of it."""
    length = base.length(settings.length)
    reporter.step("data", settings.data)
    data = read_text_data(Path(settings.data), base.tokenizer, base.template, length, base.end)
    fault = packing_fault(base.model.eval(), base.vocab) if settings.packing else None
    packed = settings.packing and fault is None
    sequences, aside = split_documents(data, settings.held_out, training.seed)
    rows = SequenceRows(sequences, length, base.end or 0, packed=packed)
    held_out = SequenceRows(aside, length, base.end or 0, packed=packed) if aside else None
    full = rows.tokens / (len(rows) * length)
    found = [
        Finding(
            "data",
            "rows",
            len(rows),
            "rows",
            f"{len(sequences)} sequences, {full:.0%} of {length} tokens each",
        ),
        Finding("data", "trained tokens", rows.trained_tokens, "tokens", f"of {rows.tokens}"),
        Finding("data", "held out", len(aside), "sequences", "measured, never trained on"),
    ]
    if fault is not None:
        found.append(Finding("data", "packing", False, why=fault))
    if data.cut:
        found.append(Finding("data", "cut", data.cut, "sequences", f"longer than --length {length}"))
    reporter.found(found)
    return rows, held_out


def _check_output(output: Path, replace: bool) -> None:
    if not output.exists():
        return
    if not replace:
        raise BusyError(f"{output} exists", hint="Choose another --output, or replace it with --force")
    if not (output / "adapter_config.json").is_file():
        raise BusyError(f"{output} exists and is no adapter", hint="Choose another --output")


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """Make a folder beside the output, which is gone afterwards unless it was renamed."""
    folder = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    with writing(output):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
