"""Module with tensors in and tensors out around a module whose calls have a structure."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from .call_structure import CallReader, Structure, take_apart


def flat_module(module: nn.Module, structure: Structure) -> nn.Module:
    """Wrap `module`: tensors by the names of `structure` in, the tuple of its output tensors back."""
    names, reader = structure.names, CallReader(module)

    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        given = {**dict(zip(names, args, strict=False)), **named}
        positional, keywords = reader.arguments(structure, [given[name] for name in names])
        _, outputs = take_apart(self.model(*positional, **keywords), "output")  # type: ignore[operator]
        return tuple(outputs)

    kind = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD
    )  # the exporter reads the names of inputs from the signature
    parameters = [inspect.Parameter(name, kind) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper: Any = type(type(module).__name__, (nn.Module,), {"forward": forward})()
    wrapper.model = module
    wrapper.training = module.training
    return wrapper
