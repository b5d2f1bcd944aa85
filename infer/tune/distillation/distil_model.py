"""Distillation from a teacher, a student and data to the student's folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...errors import NotUsableError, UsageError
from ...graph.capture import check_input_names
from ...load.heads.text import Decoder, EncoderDecoder
from ...load.samples.read_samples import read_data
from ...options import checked
from ...reporter import Reporter
from ...spec import Finding
from ..checkpoints import remove_checkpoints, whole
from ..data.text_rows import text_rows
from ..language_model import language_model_of
from ..learning_curve import JSON_FILE, TrainingReport, write_report
from ..memory.plan_run import plan_run
from ..objective import Objective, Rows
from ..objectives.output_objective import OutputObjective
from ..output_folder import publish_folder, require_free
from ..settings import TrainSettings
from ..training_environment import first_process, missing
from ..training_loop import STAGE, train
from .language_objective import LanguageObjective
from .sample_rows import split_rows
from .settings import DistilSettings
from .student_folder import save_student
from .teacher import Pair, open_pair

MOST_ROWS = 1 << 16  # texts and images that are held in memory


def distil(
    settings: DistilSettings,
    training: TrainSettings,
    output: Path,
    *,
    replace: bool = False,
    reporter: Reporter | None = None,
) -> TrainingReport:
    """Train a student to give its teacher's outputs and write it to the folder `output`; return the report in it.

    Checkpoints are in `OUTPUT.checkpoints` until the folder is published. Raises `UsageError` for options or a student
    that does not fit its teacher, `SourceError` for data, `BusyError` where the output exists, and what `train` raises.
    """
    settings, training, reporter = checked(settings), checked(training), reporter or Reporter()
    if why := missing():
        raise NotUsableError(why)
    require_free(output, JSON_FILE, replace=replace)
    reporter.step("load", settings.source)
    pair = open_pair(settings)
    reporter.found(_sizes(pair))
    objective, rows, held_out = _task(pair, settings, training, reporter)
    pair.trained.requires_grad_(True)
    checkpoints = output.with_name(f"{output.name}.checkpoints")
    chosen, plan = plan_run(objective, rows, training, checkpoints, reporter)
    result = train(objective, rows, held_out, chosen, checkpoints, reporter, plan)
    report = TrainingReport.of("distil", result, settings, training, reporter.findings)
    tensors = {name: whole(each) for name, each in pair.trained.state_dict().items()}
    if first_process():
        with publish_folder(output) as folder:
            save_student(pair.trained, tensors, pair.loaded, settings.source, folder)
            write_report(report, folder)
        remove_checkpoints(checkpoints)
    return report


def _task(
    pair: Pair, settings: DistilSettings, training: TrainSettings, reporter: Reporter
) -> tuple[Objective, Rows, Rows | None]:
    """Return the loss that goes with the teacher's outputs, and the rows of its inputs."""
    loaded = pair.loaded
    if isinstance(loaded.module, Decoder):
        base = language_model_of(loaded, settings.source)
        rows, held_out = text_rows(
            base, settings.data, settings.length, training.seed, settings.held_out, reporter
        )
        objective = LanguageObjective(
            pair.trained,
            base.model,
            temperature=settings.temperature,
            hard=settings.hard,
            hidden=settings.hidden,
            layers=pair.layers,
        )
        reporter.found(objective.findings)
        return objective, rows, held_out
    if isinstance(loaded.module, EncoderDecoder):
        raise NotUsableError("distillation of encoder-decoder models is not supported")
    if settings.hard:
        raise UsageError("--hard is for language models: other data has no next token", where="--hard")
    samples, source, digest = read_data(settings.data, loaded, most=MOST_ROWS)
    taught, aside = split_rows(samples, settings.held_out, training.seed)
    count = 0 if aside is None else len(aside)
    reporter.found(
        [
            Finding("data", "rows", len(taught), "rows", f"{source}; sha256 {digest}"),
            Finding("data", "held out", count, "rows", "measured, never trained on"),
        ]
    )
    made = OutputObjective(
        pair.student,
        pair.teacher,
        loaded.outputs,
        loaded.task,
        temperature=settings.temperature,
        hidden=settings.hidden,
        layers=pair.layers,
    )
    for module in (pair.teacher, pair.student):
        check_input_names(module, loaded.inputs, "Teacher and student take inputs of equal names")
    _check_outputs(made, taught)
    return made, taught, aside


@torch.no_grad()
def _check_outputs(objective: OutputObjective, rows: Rows) -> None:
    """Raise `UsageError` before training where the outputs of teacher and student can't be compared."""
    objective.model.eval()
    objective.measure(rows.batch([0]))


def _sizes(pair: Pair) -> list[Finding]:
    counts = [_weights(each) for each in (pair.teacher, pair.student)]
    share = counts[1] / max(counts[0], 1)
    found = [Finding(STAGE, "student", counts[1], "weights", f"{share:.0%} of its teacher's {counts[0]}")]
    if pair.made_of is not None:
        layers = ", ".join(map(str, pair.made_of.layers))
        found.append(
            Finding(STAGE, "layers taken", len(pair.made_of.layers), "layers", f"the teacher's {layers}")
        )
    return found


def _weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
