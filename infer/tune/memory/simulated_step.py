"""Memory of one training step, found by running it on tensors without data.

A step runs under `FakeTensorMode`: every operator gives shapes and no numbers, so that a step of any size is measured
in a second or two and without its memory. A tensor counts from its creation to its release, weights not at all.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..data.rows import to_device
from ..optimizers import trainable
from .activation_checkpointing import repeated_blocks

OUTSIDE = "outside of blocks"
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)


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

    def extended(self, two: StepMemory, rows: int) -> StepMemory:
        """Return the memory of `rows` rows, where this is that of one and `two` that of two rows."""

        def line(first: int, second: int) -> int:
            return max(first + (second - first) * (rows - 1), 0)

        names = {**self.by_block, **two.by_block}
        blocks = {n: line(self.by_block.get(n, 0), two.by_block.get(n, 0)) for n in names}
        activations, peak = line(self.activations, two.activations), line(self.peak, two.peak)
        return StepMemory(activations, self.gradients, peak, blocks)


def step_memory(
    model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, device: torch.device
) -> StepMemory:
    """Return the memory of `loss(batch).backward()`; neither the model nor its gradients change.

    Runs without data, or with it where the loss asks for values.
    """
    moved = to_device(batch, device)
    try:
        return _traced(model, loss, moved, fake=True)
    except NEEDS_DATA:
        with torch.random.fork_rng():
            return _traced(model, loss, moved, fake=False)


def _traced(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, *, fake: bool) -> StepMemory:
    parameters = list(trainable(model).values())
    held: list[Tensor] = [*model.parameters(), *model.buffers()]
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext() as mode:
        if mode is not None:
            batch = tree_map_only(Tensor, mode.from_tensor, batch)
            held = [mode.from_tensor(tensor) for tensor in held]  # what operators then get in their place
        storages = {tensor.untyped_storage()._cdata for tensor in held}
        kept, tracker = _SavedTensors(model, storages), AllocationTracker(storages)
        with tracker:
            with kept:
                total = loss(batch)
            activations = tracker.live
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    del gradients, total
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    return StepMemory(activations, num_bytes, tracker.peak, kept.by_block())


class AllocationTracker(TorchDispatchMode):
    """Count the bytes of tensors that are alive, and the most that were at once; storages `held` are left out."""

    def __init__(self, held: Set[int]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._held = held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known or storage._cdata in self._held:
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

    def __init__(self, model: nn.Module, held: Set[int]) -> None:
        self._blocks = repeated_blocks(model)
        self._running: list[str] = []
        self._sizes: dict[int, tuple[str, int]] = {}
        self._hooks = ExitStack()
        self._held = held

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
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            name = self._running[-1] if self._running else OUTSIDE
            self._sizes.setdefault(storage._cdata, (name, storage.nbytes()))
        return tensor

    def by_block(self) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for name, size in self._sizes.values():
            found[name] += size
        return dict(found)
