"""`infer distil`: a smaller model trained to give a teacher's outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ..tune.settings import DATA, STUDENT, TRAINING, WEIGHTS, DistilSettings, TrainSettings
from .options import AsJson, with_options


@with_options(DistilSettings, (DATA, STUDENT, TRAINING), TrainSettings)
def distil(
    settings: DistilSettings,
    training: TrainSettings,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of the student to write")],
    force: Annotated[bool, typer.Option(help="replace an existing student")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="print every finding")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a student to give TEACHER's outputs on data without labels; then optimize it.

    `--student half` leaves out every second layer of the teacher.
    Several processes: accelerate launch -m infer distil …
    """
    from ..tune.distillation.distil import distil as run
    from . import output as printed

    with printed.progress_reporter(quiet=as_json, verbose=verbose) as reporter:
        report = run(settings, training, output, replace=force, reporter=reporter)
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    printed.print_facts(
        {**report.facts(), "student": str(output), "next": _next(settings, output)}, as_json=False
    )


def _next(settings: DistilSettings, output: Path) -> str:
    """Return the command that optimizes the student."""
    weights = output / WEIGHTS
    source = f"{weights} --model {settings.student}" if weights.is_file() else str(output)
    return f"infer optimize {source} --data {settings.data}"
