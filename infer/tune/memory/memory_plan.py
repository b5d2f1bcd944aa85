"""Memory of a training run, planned before its first step and compared with the peak measured after it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ...device import memory
from ...errors import NotUsableError, ResourceError, UsageError
from ...paths import writing
from ...report.rendering import formatting
from ...reporter import Reporter
from ...spec import Finding
from ..checkpoints import CHOICES
from ..objective import Objective, Rows
from ..optimizers import build_optimizers
from ..settings import TrainSettings
from .activation_checkpointing import checkpointing, repeated_blocks
from .simulated_step import OUTSIDE, StepMemory, step_memory

STAGE = "memory"
SMALL_STATE = 4096  # elements below which bitsandbytes keeps states in float32
INTERPRETER = 400 << 20  # python and libraries, where weights are not yet in memory


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a training run by what they are for, on one device; `settings` are those they hold for.

    `process` is the interpreter with its libraries and buffers, 0 on an accelerator.
    """

    settings: TrainSettings
    process: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    by_block: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Planned peak memory in bytes."""
        kept = self.process + self.weights + self.gradients + self.optimizer
        return kept + self.activations + self.workspace

    @property
    def techniques(self) -> str:
        """The choices that decide the peak, in words."""
        used = [f"micro-batch {self.settings.micro_batch or self.settings.batch}"]
        used += ["activation checkpointing"] if self.settings.activation_checkpointing else []
        return ", ".join([*used, self.settings.optimizer, self.settings.precision])

    @property
    def summary(self) -> str:
        """Planned peak, what decides it and its largest parts, in one sentence."""
        return f"planned peak {formatting.size(self.total)} ({self.techniques}): {self.largest_parts}"

    @property
    def largest_parts(self) -> str:
        names = ("process", "weights", "gradients", "optimizer", "activations", "workspace")
        sizes = sorted(((getattr(self, name), name) for name in names), reverse=True)
        return ", ".join(f"{name} {formatting.size(size)}" for size, name in sizes[:3])

    def findings(self) -> list[Finding]:
        """List each part and the sum, in bytes, for display."""
        blocks = {name: size for name, size in self.by_block.items() if name != OUTSIDE}
        largest = max(blocks, key=lambda name: blocks[name], default="")
        share = (
            f"{len(blocks)} blocks, at most {formatting.size(blocks[largest])} in {largest}" if blocks else ""
        )
        parts = {
            "process": (self.process, "interpreter and libraries"),
            "weights": (self.weights, "frozen and trained"),
            "gradients": (self.gradients, "of the trained weights"),
            "optimizer states": (self.optimizer, self.settings.optimizer),
            "activations": (self.activations, share),
            "workspace": (self.workspace, "temporaries of the backward"),
            "planned peak": (self.total, self.techniques),
        }
        return [Finding(STAGE, what, size, "bytes", why) for what, (size, why) in parts.items()]

    def compared(self, measured: int) -> Finding:
        """Compare with the peak that was measured after the first step, in bytes."""
        why = f"planned {formatting.size(self.total)}, {measured / max(self.total, 1) - 1:+.0%}"
        return Finding(STAGE, "measured peak", measured, "bytes", why)


def plan_memory(objective: Objective, rows: Rows, settings: TrainSettings) -> MemoryPlan:
    """Plan a run with these settings; takes a second or two, and no memory of the size that it plans."""
    return MemoryPlanner(objective, rows, settings).plan(settings)


def fit_memory(objective: Objective, rows: Rows, settings: TrainSettings, limit: int) -> MemoryPlan:
    """Choose micro-batch, activation checkpointing and optimizer so that the planned peak is at most `limit` bytes.

    What costs least time is tried first: smaller micro-batches, then checkpointing, then 8-bit optimizer states where
    they are usable. What the settings give (a micro-batch, checkpointing) stays. Raises `ResourceError` with the
    smallest plan where none fits.
    """
    planner = MemoryPlanner(objective, rows, settings)
    tried: list[MemoryPlan] = []
    for candidate in planner.candidates():
        tried.append(planner.plan(candidate))
        if tried[-1].total <= limit:
            return tried[-1]
    smallest = min(tried, key=lambda plan: plan.total)
    raise ResourceError(
        f"training needs at least {formatting.size(smallest.total)} ({smallest.techniques}), allowed are "
        f"{formatting.size(limit)}: {smallest.largest_parts}",
        hint=f"Give --max-memory {-(-smallest.total // 10**6)}MB, shorter rows or fewer trained weights",
    )


class MemoryPlanner:
    """Plans of one model and its rows; steps of one and of two rows are simulated, other sizes follow from them."""

    def __init__(self, objective: Objective, rows: Rows, settings: TrainSettings) -> None:
        self.objective, self.rows, self.settings = objective, rows, settings
        self.device = next(objective.model.parameters()).device
        self._steps: dict[tuple[bool, str, int], StepMemory] = {}
        held = [*objective.model.parameters(), *objective.model.buffers()]
        self.weights = storage_bytes([*held, *_teacher(objective)])

    def candidates(self) -> list[TrainSettings]:
        """List settings to try, those that cost least time first."""
        asked = self.settings
        largest = asked.micro_batch or asked.batch
        sizes = [asked.micro_batch] if asked.micro_batch else _halves(largest)
        blocks = bool(repeated_blocks(self.objective.model))
        modes = [True] if asked.activation_checkpointing else [False, True] if blocks else [False]
        optimizers = [asked.optimizer]
        if asked.optimizer == "adamw":
            _, refused = build_optimizers(
                self.objective.model,
                msgspec.structs.replace(asked, optimizer="adamw8bit"),
                self.device.type,
            )
            optimizers += [] if refused else ["adamw8bit"]
        change = msgspec.structs.replace
        return [
            change(asked, micro_batch=size, activation_checkpointing=mode, optimizer=optimizer)
            for optimizer in optimizers
            for mode in modes
            for size in sizes
        ]

    def plan(self, settings: TrainSettings) -> MemoryPlan:
        """Plan a run with these settings."""
        size = min(settings.micro_batch or settings.batch, len(self.rows))
        step = self._step(settings, size)
        return MemoryPlan(
            settings=settings,
            process=self._process(),
            weights=self.weights,
            gradients=step.gradients,
            optimizer=optimizer_bytes(self.objective.model, settings, self.device.type),
            activations=step.activations,
            workspace=step.workspace,
            by_block=step.by_block,
        )

    def _process(self) -> int:
        if self.device.type != "cpu":
            return 0
        return max(memory.rss() - self.weights, INTERPRETER)

    def _step(self, settings: TrainSettings, size: int) -> StepMemory:
        if size <= 2:
            return self._measured(settings, size)
        one, two = self._measured(settings, 1), self._measured(settings, 2)
        return one.extended(two, size)

    def _measured(self, settings: TrainSettings, size: int) -> StepMemory:
        key = settings.activation_checkpointing, settings.precision, size
        if key not in self._steps:
            with checkpointing(self.objective.model, on=settings.activation_checkpointing):
                self._steps[key] = self._run(settings, size)
        return self._steps[key]

    def _run(self, settings: TrainSettings, size: int) -> StepMemory:
        model, kind = self.objective.model, self.device.type
        dtype = getattr(torch, settings.precision)
        numbers = [index % len(self.rows) for index in range(size)]

        def loss(batch: Any) -> Tensor:
            with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
                return self.objective.loss(batch)[0]

        training = model.training
        model.train()
        try:
            return step_memory(model, loss, self.rows.batch(numbers), self.device)
        finally:
            model.train(training)


def _halves(size: int) -> list[int]:
    return [size] if size == 1 else [size, *_halves(size // 2)]


def _teacher(objective: Objective) -> list[Tensor]:
    """Return the tensors of other models that an objective holds as attributes."""
    own = {id(module) for module in objective.model.modules()}
    others = [
        value for value in vars(objective).values() if isinstance(value, nn.Module) and id(value) not in own
    ]
    return [tensor for each in others for tensor in (*each.parameters(), *each.buffers())]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
    return sum(found.values())


def optimizer_bytes(model: nn.Module, settings: TrainSettings, device: str) -> int:
    """Return the bytes of optimizer states after the first step; paged ones count where they are used."""
    optimizers, _ = build_optimizers(model, settings, device)
    total = 0
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        name = type(optimizer).__name__
        if name not in _STATES:
            raise NotUsableError(f"the memory of {name} is not known")
        total += sum(_STATES[name](parameter) for parameter in parameters)
    return total


_STATES: dict[str, Any] = {
    "AdamW": lambda p: 2 * p.nbytes,
    "Muon": lambda p: p.nbytes,
    "AdamW8bit": lambda p: 2 * p.numel() * (1 if p.numel() >= SMALL_STATE else 4),
    "PagedAdamW8bit": lambda p: 2 * p.numel() * (1 if p.numel() >= SMALL_STATE else 4),
}


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
