"""Partial re-execution of a model after one layer changed: earlier blocks are not computed again.

The outputs of blocks (children of a ModuleList or Sequential) are kept from one float run. Blocks that had finished
before the changed layer began give what they gave; a run on half of the blocks takes half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import library_errors
from ...graph.program import flatten
from ...module_hooks import fast_paths_off, hooked

MOST_BYTES = 1 << 30  # of kept block outputs


@dataclass
class Block:
    """Block of the recorded float run: its end and its output; one called more than once can't be replayed."""

    module: nn.Module
    end: int = -1
    calls: int = 0
    output: Any = None


class Replay:
    """Recorded run of `model`, called by keyword with `inputs`; `run` recomputes the outputs after a change.

    The model is deterministic and in eval mode. Whether a replay gives the float outputs to the bit is tried once;
    where it does not (a block with side effects), every run is a whole one.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Tensor]) -> None:
        self._model, self._inputs = model, inputs
        self._first: dict[int, int] = {}
        self._blocks = [Block(module) for module in _blocks(model)]
        with library_errors.float_model_errors(), _recording(self._blocks, layers, self._first):
            self.outputs = self._forward()
        self._blocks = [b for b in self._blocks if b.calls == 1]
        if _size(self._blocks) > MOST_BYTES or not self._is_exact():
            self._blocks = []

    def _is_exact(self) -> bool:
        again = self._replayed([b for b in self._blocks if b.end < max(o.end for o in self._blocks)])
        return all(torch.equal(a, b) for a, b in zip(again, self.outputs, strict=True))

    def run(self, changed: Sequence[nn.Module]) -> list[Tensor]:
        """Compute the outputs after the layers at the places of `changed` were replaced."""
        starts = [self._first[id(layer)] for layer in changed if id(layer) in self._first]
        if not starts:  # no input reaches any of them
            return self.outputs
        return self._replayed([block for block in self._blocks if block.end < min(starts)])

    def _replayed(self, done: Sequence[Block]) -> list[Tensor]:
        try:
            for block in done:
                block.module.forward = _returning(block.output)  # type: ignore[method-assign]
            return self._forward()
        finally:
            for block in done:
                del block.module.forward

    def _forward(self) -> list[Tensor]:
        with torch.no_grad(), fast_paths_off():
            return flatten(self._model(**self._inputs))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost children of ModuleList and Sequential."""
    for child in model.children():
        if isinstance(model, nn.ModuleList | nn.Sequential):
            yield child
        else:
            yield from _blocks(child)


def _returning(output: Any) -> Callable[..., Any]:
    def forward(*args: Any, **named: Any) -> Any:
        return pytree.tree_map_only(Tensor, Tensor.clone, output)  # callers may write into what they get

    return forward


def _size(blocks: Sequence[Block]) -> int:
    leaves = (leaf for block in blocks for leaf in pytree.tree_leaves(block.output))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


@contextmanager
def _recording(blocks: Sequence[Block], layers: Sequence[nn.Module], first: dict[int, int]) -> Iterator[None]:
    """Record the order in which blocks end and layers first start during a run."""
    clock = iter(range(1 << 60))

    def ended(block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            block.end, block.calls = next(clock), block.calls + 1
            block.output = pytree.tree_map_only(Tensor, Tensor.clone, output)

        return hook

    def began(module: nn.Module, args: Any) -> None:
        first.setdefault(id(module), next(clock))

    ends = [block.module.register_forward_hook(ended(block)) for block in blocks]
    with hooked([*ends, *(layer.register_forward_pre_hook(began) for layer in layers)]):
        yield
