"""Hooks on the layers of a model while it runs, each layer called as its own code is written.

torch's Transformer layers have a fast path that computes a block in one operator: the layers inside are not called, and
with a padding mask blocks hand each other nested tensors, which layers with hooks cannot take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle


@contextmanager
def fast_paths_off() -> Iterator[None]:
    """Disable the fast paths of torch's Transformer layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks on layers, without fast paths around them, and remove them at the end."""
    kept = list(handles)
    try:
        with fast_paths_off():
            yield
    finally:
        for handle in kept:
            handle.remove()
