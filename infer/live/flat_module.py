"""Module with tensors in and tensors out around a module whose calls have a structure."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..graph.capture import wrapped
from .call_structure import CallReader, Structure, take_apart


def flat_module(module: nn.Module, structure: Structure) -> nn.Module:
    """Wrap `module`: tensors by the names of `structure` in, the tuple of its output tensors back."""
    reader = CallReader(module)

    def call(model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        positional, named = reader.arguments(structure, [tensors[name] for name in structure.names])
        _, outputs = take_apart(model(*positional, **named), "output")
        return tuple(outputs)

    return wrapped(type(module).__name__, module, structure.names, call)
