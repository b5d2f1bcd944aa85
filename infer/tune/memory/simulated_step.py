"""Memory of one training step, found by running it on tensors without data.

A step runs under `FakeTensorMode`: every operator gives shapes and no numbers, so that a step of any size is measured
in a second or two and without its memory. A tensor counts from its creation to its release, weights not at all.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..optimizers import trainable
from .activation_checkpointing import repeated_blocks

OUTSIDE = "outside of blocks"


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one forward and backward beside the weights.

    `activations` live from the forward to the backward; `by_block` names the block that made them. `workspace` is what
    the peak has beyond activations and gradients: temporaries, and gradients of activations.
    """

    activations: int
    gradients: int
    peak: int
    by_block: Mapping[str, int] = field(default_factory=dict)

    @property
    def workspace(self) -> int:
        return max(self.peak - self.activations - self.gradients, 0)


def simulate_step(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> StepMemory:
    """Run `loss(batch).backward()` without data and return its memory; neither model nor gradients change.

    `loss` takes a batch of tensors, in any nesting, whose values it must not ask for.
    """
    tracker = AllocationTracker()
    kept = _SavedTensors(model)
    parameters = list(trainable(model).values())
    # A step asks for numbers where it draws dropout, and none otherwise.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, batch)
        with tracker:
            with kept:
                total = loss(given)
            activations = tracker.live
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    del gradients, total
    return StepMemory(activations, num_bytes, tracker.peak, kept.by_block())


class AllocationTracker(TorchDispatchMode):
    """Count the bytes of fake tensors that are alive, and the most that were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._released, size)

    def _released(self, size: int) -> None:
        self.live -= size


class _SavedTensors:
    """Bytes that autograd keeps for the backward, by the repeated block that runs; parameters are left out."""

    def __init__(self, model: nn.Module) -> None:
        self._blocks = repeated_blocks(model)
        self._running: list[str] = []
        self._sizes: dict[int, tuple[str, int]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        for name, block in self._blocks.items():
            enter = block.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
            leave = block.register_forward_hook(lambda *_: self._leave(), always_call=True)
            self._hooks.callback(enter.remove)
            self._hooks.callback(leave.remove)
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t))

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _leave(self) -> None:
        self._running.pop()

    def _keep(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            name = self._running[-1] if self._running else OUTSIDE
            self._sizes.setdefault(storage._cdata, (name, storage.nbytes()))
        return tensor

    def by_block(self) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for name, size in self._sizes.values():
            found[name] += size
        return dict(found)
