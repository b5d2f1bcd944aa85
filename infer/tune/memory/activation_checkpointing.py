"""Activation checkpointing: blocks keep their inputs alone and compute again in the backward (Chen et al. 2016).

Blocks are the layers that transformers marks for it, or else the members of the longest lists of modules of one
class: the layers of any decoder, encoder or ResNet stage. About a third more time for a fraction of the activations
(arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import NotUsableError

MARK = "GradientCheckpointingLayer"  # of transformers, told by name without importing it


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks of a model by name, in order; empty where nothing repeats."""
    marked = {
        name: module
        for name, module in model.named_modules()
        if any(kind.__name__ == MARK for kind in type(module).__mro__)
    }
    found = marked or {
        f"{name}.{index}" if name else index: block
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for index, block in module.named_children()
        if _repeats(block, module)
    }
    return {name: block for name, block in found.items() if not _inside(name, found)}


def _repeats(block: nn.Module, siblings: nn.Module) -> bool:
    same = sum(type(other) is type(block) for other in siblings.children())
    return same > 1 and any(True for _ in block.children())


def _inside(name: str, names: dict[str, nn.Module]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts)))


def checkpoint_blocks(model: nn.Module) -> list[str]:
    """Compute the repeated blocks again in the backward, in place and until `keep_activations`; return their names.

    Works in training and evaluation mode, wherever gradients are on. Turns the cache of a decoder off, which a second
    forward would fill twice. Raises `NotUsableError` where no block repeats.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise NotUsableError(
            f"{type(model).__name__} has no repeated blocks to checkpoint",
            hint="Train without --activation-checkpointing",
        )
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        if getattr(each, "use_cache", None):
            each.use_cache = False  # type: ignore[union-attr]
    for block in blocks.values():
        if "forward" not in vars(block):
            block.forward = _recomputed(block.forward)  # type: ignore[method-assign]
    return list(blocks)


def keep_activations(model: nn.Module) -> None:
    """Undo `checkpoint_blocks`."""
    for block in repeated_blocks(model).values():
        if getattr(vars(block).get("forward"), "recomputes", False):
            del block.forward


@contextmanager
def checkpointing(model: nn.Module, *, on: bool) -> Iterator[None]:
    """Turn activation checkpointing on or off within the context."""
    before = any("forward" in vars(block) for block in repeated_blocks(model).values())
    (checkpoint_blocks if on else keep_activations)(model)
    try:
        yield
    finally:
        (checkpoint_blocks if before else keep_activations)(model)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **named)
        return checkpoint(forward, *args, use_reentrant=False, **named)

    recomputed.recomputes = True  # type: ignore[attr-defined]
    return recomputed
