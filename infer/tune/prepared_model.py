"""Model and optimizers of a run as Accelerate prepared them: gradient, update and measure on all processes together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..device import memory
from ..errors import UsageError
from . import checkpoints
from .gradient_accumulation import ObjectiveModule, accumulate, average, mean_measure
from .memory.activation_checkpointing import checkpoint_blocks
from .objective import Objective, Rows
from .optimizers import build_optimizers, trainable
from .settings import TrainSettings
from .training_environment import new_accelerator, step_seed

T = TypeVar("T")


class PreparedModel:
    """Trainable parameters of an objective, their optimizers and the process's accelerator.

    `findings`: what the optimizers do otherwise than was asked. Raises `UsageError` for a model without a trainable
    parameter, `NotUsableError` as `new_accelerator` and `build_optimizers` do.
    """

    def __init__(self, objective: Objective, settings: TrainSettings) -> None:
        self.settings = settings
        self.accelerator = new_accelerator(settings)
        self.is_main = self.accelerator.is_main_process
        if not trainable(objective.model):
            raise UsageError("the model has no parameter to train")
        if settings.activation_checkpointing:
            checkpoint_blocks(objective.model)
        device = self.accelerator.device.type
        self._plain_optimizers, self.findings = build_optimizers(objective.model, settings, device)
        prepared = self.accelerator.prepare(ObjectiveModule(objective), *self._plain_optimizers)
        self.module, self.optimizers = prepared[0], prepared[1:]
        self.parameters = trainable(objective.model)  # sharding made others

    def accumulate(self, rows: Rows, numbers: Sequence[int], step: int) -> tuple[float, int]:
        """Add the gradient of the loss over these rows; return the mean loss and the number of its terms."""
        self.module.train()
        torch.manual_seed(step_seed(self.settings.seed, step, self.accelerator.process_index))
        return accumulate(self.accelerator, self.module, rows, numbers, self.settings.micro_batch)

    def clip(self, terms: int) -> float:
        """Divide the gradient by the number of terms and clip it; return its norm before clipping."""
        parameters = list(self.parameters.values())
        average(self.accelerator, parameters, terms)
        clipped = self.accelerator.clip_grad_norm_(parameters, self.settings.clip or math.inf)
        return float(checkpoints.whole(clipped))

    def update(self, rate: float) -> None:
        """Step the optimizers with this learning rate and reset the gradient."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def measure(self, rows: Rows) -> float:
        """Return the objective's measure over all rows."""
        self.module.eval()
        size = self.settings.micro_batch or self.settings.batch
        value = mean_measure(self.accelerator, self.module, rows, size)
        # FSDP leaves parameters whole after a forward pass without backward.
        if hasattr(self.module, "reshard"):
            self.module.reshard()
        return value

    def whole_parameters(self) -> dict[str, Tensor]:
        """Return the parameters, gathered where they are sharded; every process has to call it."""
        return {name: checkpoints.whole(each) for name, each in self.parameters.items()}

    def run_tensors(self) -> dict[str, Tensor]:
        """Return parameters and optimizer states for a checkpoint; every process has to call it."""
        return checkpoints.run_tensors(self.parameters, self._plain_optimizers)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put parameters and optimizer states of a checkpoint back."""
        checkpoints.restore(self.parameters, self._plain_optimizers, tensors)

    def agreed(self, value: T) -> T:
        """Return the value of the first process: clocks and signals differ between processes."""
        from accelerate.utils import broadcast_object_list

        return value if self.accelerator.num_processes == 1 else broadcast_object_list([value])[0]

    def peak_memory(self) -> int:
        """Return the most bytes that this process took: on the GPU where it trains there, else resident."""
        cuda = self.accelerator.device.type == "cuda"
        return torch.cuda.max_memory_allocated() if cuda else memory.peak_rss()
