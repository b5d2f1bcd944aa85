"""Model and optimizers of a run as Accelerate prepared them: gradient, update and measure on all processes together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..device import memory
from ..errors import UsageError
from . import checkpoints
from .data.rows import to_device
from .memory.activation_checkpointing import checkpoint_blocks
from .objective import Objective, Rows
from .optimizers import build_optimizers, trainable
from .settings import TrainSettings
from .training_environment import new_accelerator

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
        """Add the gradient of the summed loss over these rows; return the mean loss and the number of terms.

        `clip` then divides by that number: a mean of means would weigh short micro-batches too much.
        """
        self.module.train()
        self._seed(step)
        parts = self._micro_batches(numbers, self.settings.micro_batch)
        totals = self._zeros()
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.module):
                batch = to_device(rows.batch(part or numbers[:1]), self.accelerator.device)
                loss, terms = self.module(batch)
                if not part:
                    loss, terms = loss * 0, terms * 0
                self.accelerator.backward(loss)
            totals += torch.stack([as_scalar(loss, totals), as_scalar(terms, totals)])
            del loss, batch
        loss, terms = self.accelerator.reduce(totals, reduction="sum").tolist()
        return (loss / terms if terms else 0.0), round(terms)

    def _seed(self, step: int) -> None:
        """Seed the generators of the CPU and of the device; `torch.manual_seed` takes .5 ms for those not in use."""
        seed = step_seed(self.settings.seed, step, self.accelerator.process_index)
        torch.default_generator.manual_seed(seed)
        if self.accelerator.device.type != "cpu":
            torch.get_device_module(self.accelerator.device).manual_seed(seed)

    def _micro_batches(self, numbers: Sequence[int], size: int | None) -> list[list[int]]:
        return micro_batches(numbers, size, self.accelerator.process_index, self.accelerator.num_processes)

    def _zeros(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)

    def clip(self, terms: int) -> float:
        """Divide the gradient by the number of terms and clip it; return its norm before clipping.

        Processes have taken the mean of their gradients, which are sums.
        """
        parameters = list(self.parameters.values())
        gradients = [each.grad for each in parameters if each.grad is not None]
        if gradients and terms:
            torch._foreach_mul_(gradients, self.accelerator.num_processes / terms)
        clipped = self.accelerator.clip_grad_norm_(parameters, self.settings.clip or math.inf)
        return float(checkpoints.whole(clipped))

    def update(self, rate: float) -> None:
        """Step the optimizers with this learning rate and reset the gradient."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def measure(self, rows: Rows) -> float:
        """Return the objective's measure over all rows, weighed by terms."""
        self.module.eval()
        totals, numbers = self._zeros(), list(range(len(rows)))
        for part in self._micro_batches(numbers, self.settings.micro_batch or self.settings.batch):
            batch = to_device(rows.batch(part or numbers[:1]), self.accelerator.device)
            value, terms = self.module(batch, measure=True)
            if part:
                totals += torch.stack([as_scalar(value, totals), as_scalar(terms, totals)])
        value, terms = self.accelerator.reduce(totals, reduction="sum").tolist()
        # FSDP leaves parameters whole after a forward pass without backward.
        if hasattr(self.module, "reshard"):
            self.module.reshard()
        return value / terms if terms else 0.0

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


class ObjectiveModule(nn.Module):
    """Objective as a module, so that all parameters it reads are inside of what DDP or FSDP wraps."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.model = objective.model
        self._objective = [objective]  # in a list: it may be a module itself, whose teacher is not trained

    def forward(self, batch: Any, measure: bool = False) -> tuple[Any, Any]:
        objective = self._objective[0]
        return objective.measure(batch) if measure else objective.loss(batch)


def micro_batches(
    numbers: Sequence[int], size: int | None, process: int, num_processes: int
) -> list[list[int]]:
    """Split the rows of a step between processes, and a process's own into micro-batches of `size` rows.

    Every process gets as many lists, some perhaps empty, since all take part in each forward pass.
    """
    own = list(numbers[process::num_processes])
    most = -(-len(numbers) // num_processes)
    size = size or most
    return [own[start : start + size] for start in range(0, most, size)]


def as_scalar(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a scalar in the dtype and on the device of `like`."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().reshape(())


def step_seed(seed: int, step: int, process: int) -> int:
    """Return the seed of all random numbers that a process draws in a step."""
    text = f"{seed} {step} {process}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
