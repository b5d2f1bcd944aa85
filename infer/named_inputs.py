"""Modules that are called by tensors of any names, which the signature of their forward lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def row_by_row(call: Callable[[Mapping[str, Tensor]], Any], tensors: Mapping[str, Tensor]) -> Any:
    """Return the outputs of a call that takes one row, for several rows along the first axes: of call after call.

    Single numbers are shared by all rows.
    """
    count = max(len(value) for value in tensors.values() if value.dim())
    if count < 2:
        return call(tensors)
    cut = ({name: x[i : i + 1] if x.dim() else x for name, x in tensors.items()} for i in range(count))
    return pytree.tree_map(lambda *row: torch.cat(row), *map(call, cut))


class NamedInputs(nn.Module):
    """Base of modules whose inputs are known where they are made: `call` gets them by name."""

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the outputs for the inputs."""
        raise NotImplementedError

    def taking(self, names: Sequence[str], kind: str = "") -> Self:
        """Return the module itself, of a class (called `kind`) whose forward takes the tensors `names`.

        torch.export reads them from its signature. A copy of the module calls itself, since forward is of the class.
        """

        def forward(self: Self, *values: Tensor, **tensors: Tensor) -> Any:
            return self.call({**dict(zip(names, values, strict=False)), **tensors})

        by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, by_name) for name in ("self", *names)]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        own = type(self)
        self.__class__ = type(kind or own.__name__, (own,), {"forward": forward})
        return self
