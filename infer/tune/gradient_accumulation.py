"""Gradient of one step from micro-batches and processes of any size, equal to that of one large batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .objective import Objective, Rows


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


def accumulate(
    accelerator: Any, module: nn.Module, rows: Rows, numbers: Sequence[int], size: int | None
) -> tuple[float, int]:
    """Add the gradient of the summed loss over these rows to `.grad`; return the mean loss and the number of terms.

    `average` then divides by that number: a mean of means would weigh short micro-batches too much.
    """
    parts = micro_batches(numbers, size, accelerator.process_index, accelerator.num_processes)
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(module):
            batch = to_device(rows.batch(part or numbers[:1]), accelerator.device)
            loss, terms = module(batch)
            if not part:
                loss, terms = loss * 0, terms * 0
            accelerator.backward(loss)
        totals += torch.stack([as_scalar(loss, totals), as_scalar(terms, totals)])
        del loss, batch
    loss, terms = accelerator.reduce(totals, reduction="sum").tolist()
    return (loss / terms if terms else 0.0), round(terms)


def average(accelerator: Any, parameters: Sequence[nn.Parameter], terms: int) -> None:
    """Divide gradients by the number of terms; processes have taken the mean of theirs."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and terms:
        torch._foreach_mul_(gradients, accelerator.num_processes / terms)


@torch.no_grad()
def mean_measure(accelerator: Any, module: nn.Module, rows: Rows, size: int) -> float:
    """Return the objective's held-out measure over all rows, weighed by terms."""
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    numbers = list(range(len(rows)))
    for part in micro_batches(numbers, size, accelerator.process_index, accelerator.num_processes):
        batch = to_device(rows.batch(part or numbers[:1]), accelerator.device)
        value, terms = module(batch, measure=True)
        if part:
            totals += torch.stack([as_scalar(value, totals), as_scalar(terms, totals)])
    value, terms = accelerator.reduce(totals, reduction="sum").tolist()
    return value / terms if terms else 0.0


def as_scalar(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a scalar in the dtype and on the device of `like`."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().reshape(())


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch, in dicts, lists and tuples."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
