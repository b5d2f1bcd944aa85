"""Children of a module that it also keeps in a plain list, such as MaskFormer's convolutions.

Its forward goes through the list. A layer that takes the place of a child would not be found there, and the old one
would run on weights that were never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from torch import nn


class ListedChildren(Sequence[nn.Module]):
    """Children of `owner` by name, as they are when the sequence is read."""

    def __init__(self, owner: nn.Module, names: Sequence[str]) -> None:
        self._owner, self._names = owner, tuple(names)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        if isinstance(index, slice):
            return ListedChildren(self._owner, self._names[index])
        return self._owner.get_submodule(self._names[index])

    def __iter__(self) -> Iterator[nn.Module]:
        return (self._owner.get_submodule(name) for name in self._names)


def with_live_lists(model: nn.Module) -> nn.Module:
    """Replace plain lists of a module's own children in place, at any depth; returns `model`."""
    for module in model.modules():
        names = {child: name for name, child in module.named_children()}
        for attribute, value in list(vars(module).items()):
            if (
                isinstance(value, list)
                and value
                and all(isinstance(o, nn.Module) and o in names for o in value)
            ):
                vars(module)[attribute] = ListedChildren(module, [names[one] for one in value])
    return model
