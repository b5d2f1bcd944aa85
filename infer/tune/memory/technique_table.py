"""Memory and time of each technique on the model at hand: planned, and measured by one step of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from ...device import memory
from ...reporter import Reporter
from ..objective import Objective, Rows
from ..optimizers import build_optimizers, trainable
from ..settings import OPTIMIZERS, TrainSettings
from .activation_checkpointing import checkpointing, repeated_blocks
from .memory_plan import MemoryPlanner


@dataclass(frozen=True)
class Technique:
    """One row to measure: an objective and its settings."""

    name: str
    objective: Objective
    settings: TrainSettings


class TechniqueRow(msgspec.Struct, frozen=True):
    """Peak bytes, planned and measured, and seconds of one micro-batch and its update; what is unknown is null."""

    technique: str
    planned: int
    measured: int | None = None
    seconds: float | None = None
    why: str = ""


def techniques(objective: Objective, settings: TrainSettings) -> list[Technique]:
    """List the settings as given, and with each technique that changes memory switched alone."""
    change = msgspec.structs.replace
    batch = settings.micro_batch or settings.batch
    found = [
        Technique(f"as given: {batch} rows, {settings.optimizer}, {settings.precision}", objective, settings)
    ]
    if repeated_blocks(objective.model):
        on = not settings.activation_checkpointing
        name = f"{'with' if on else 'without'} activation checkpointing"
        found.append(Technique(name, objective, change(settings, activation_checkpointing=on)))
    if batch > 1:
        found.append(Technique("micro-batch 1", objective, change(settings, micro_batch=1)))
    other = "float32" if settings.precision == "bfloat16" else "bfloat16"
    found.append(Technique(other, objective, change(settings, precision=other)))
    for optimizer in OPTIMIZERS:
        if optimizer != settings.optimizer:
            found.append(Technique(optimizer, objective, change(settings, optimizer=optimizer)))
    return found


def measure_techniques(
    rows: Rows, listed: Sequence[Technique], reporter: Reporter | None = None
) -> list[TechniqueRow]:
    """Plan and run one step of each technique; parameters and gradients stay as they are.

    Steps have a learning rate of 0. Those that need least memory run first, because a process keeps what it once had.
    """
    planned, planners = [], dict[int, MemoryPlanner]()
    for each in listed:
        planner = planners.setdefault(id(each.objective), MemoryPlanner(each.objective, rows, each.settings))
        device = next(each.objective.model.parameters()).device.type
        _, refused = build_optimizers(each.objective.model, each.settings, device)
        why = f"{refused[-1].why}: {refused[-1].value} instead" if refused else ""
        planned.append((each, planner.plan(each.settings).total, why))
    found: dict[str, TechniqueRow] = {}
    for each, total, why in sorted(planned, key=lambda row: row[1]):
        if reporter is not None:
            reporter.progress(len(found), len(planned), each.name)
        measured, seconds = (None, None) if why else _measured_step(each, rows)
        found[each.name] = TechniqueRow(each.name, total, measured, seconds, why)
    return [found[each.name] for each in listed]


def _measured_step(technique: Technique, rows: Rows) -> tuple[int | None, float]:
    objective, settings = technique.objective, technique.settings
    parameters = list(trainable(objective.model).values())
    kind, dtype = parameters[0].device.type, getattr(torch, settings.precision)
    size = min(settings.micro_batch or settings.batch, len(rows))
    still = msgspec.structs.replace(settings, learning_rate=0.0, weight_decay=0.0)
    optimizers, _ = build_optimizers(objective.model, still, kind)
    began = _restart_peak(kind)
    with torch.random.fork_rng(), checkpointing(objective.model, on=settings.activation_checkpointing):
        with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
            loss, _ = objective.loss(rows.batch(range(size)))
        for parameter, grad in zip(
            parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            parameter.grad = grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - began
    return _peak(kind), seconds


def _restart_peak(kind: str) -> float:
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        memory.reset_peak()
    return time.perf_counter()


def _peak(kind: str) -> int:
    return torch.cuda.max_memory_allocated() if kind == "cuda" else memory.peak_rss()
