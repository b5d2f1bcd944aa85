"""Settings of a run after planning: chosen to fit a limit, kept beside the checkpoints, and reported."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ...errors import UsageError
from ...paths import writing
from ...reporter import Reporter
from ...spec import Finding
from ..checkpoints import CHOICES
from ..objective import Objective, Rows
from ..settings import TrainSettings
from .memory_plan import STAGE, MemoryPlan, fit_memory, plan_memory


class Choices(msgspec.Struct, frozen=True):
    """Settings that a plan chose, and those it was asked for."""

    asked: TrainSettings
    chosen: TrainSettings


def plan_run(
    objective: Objective, rows: Rows, settings: TrainSettings, folder: Path, reporter: Reporter
) -> tuple[TrainSettings, MemoryPlan | None]:
    """Return the settings to train with and the plan of their memory, and report it; None where it isn't planned.

    With `max_memory` micro-batch, checkpointing and optimizer are chosen. A run that is resumed from `folder` keeps
    its choices, so that it goes on with the numbers it began with. Raises `ResourceError` where nothing fits, and
    `UsageError` for a limit in a distributed run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if settings.max_memory is not None:
            raise UsageError(
                "--max-memory plans one process, and accelerate started several",
                hint="Give --micro-batch and --activation-checkpointing",
            )
        reporter.found([Finding(STAGE, "planned peak", None, "bytes", "not planned: several processes")])
        return settings, None
    chosen = None if settings.fresh else _kept(folder, settings)
    if chosen is not None or settings.max_memory is None:
        plan = plan_memory(objective, rows, chosen or settings)
    else:
        plan = fit_memory(objective, rows, settings, settings.max_memory)
        _keep(folder, Choices(settings, plan.settings))
    reporter.step(STAGE, plan.summary)
    reporter.found(plan.findings())
    return plan.settings, plan


def _kept(folder: Path, asked: TrainSettings) -> TrainSettings | None:
    """Return the choices of an earlier run of the folder that was asked for the same."""
    try:
        found = msgspec.json.decode((folder / CHOICES).read_bytes(), type=Choices)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
    return found.chosen if found.asked == asked else None


def _keep(folder: Path, choices: Choices) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{CHOICES}.tmp"
        partial.write_bytes(msgspec.json.encode(choices))
        partial.replace(folder / CHOICES)
