"""Views of the nodes of a captured program, as the lowering of its nodes reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .values import ROW, Value, View, Views, outside


class GraphReader:
    """Views of a program's nodes. `flat`: its rows are the tokens of a language model's step."""

    def __init__(self, *, flat: bool) -> None:
        self.views = Views()
        self.values: set[Value] = set()  # of the chain that is being made
        self.flat = flat
        self._outside: dict[fx.Node, View] = {}

    def in_program(self, node: fx.Node) -> bool:
        """Tell if an operation of the program that is being made computes `node`."""
        view = self.views.known.get(node)
        return view is not None and view.value in self.values

    def view(self, node: Any) -> View | None:
        """Return the view of a node, inside the program or read from outside; None if it has none."""
        if not isinstance(node, fx.Node):
            return None
        if node in self.views.known:
            return self.views.known[node]
        if node not in self._outside:
            view = outside(node, flat=self.flat)
            if view is None:
                return None
            same = self._outside.get(view.value.node)
            self._outside[node] = self._outside[view.value.node] = same or view
        return self._outside[node]

    def rows(self, node: Any) -> View | None:
        """Return the view of a node whose axes are rows and columns, else None."""
        view = self.view(node)
        return view if view is not None and view.is_rows() else None

    def is_weight(self, node: Any, width: int) -> bool:
        """Tell if `node` is a float32 weight of `width` numbers, or None."""
        if node is None:
            return True
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return False
        value = node.meta["val"]
        return value.dtype == torch.float32 and tuple(value.shape) == (width,)

    def result(self, node: fx.Node, like: View, kind: int = ROW, width: int = 0) -> View:
        """Return the dense result of an operation, its axes as those of `like`."""
        value = Value(node, like.value.domain, width or like.columns, kind, lead=like.value.lead)
        if width or like.heads == 1:
            return View(value, like.axes, width or like.width)
        return View(value, like.axes, like.width, 0, like.heads, like.width)


def arguments(node: Any, given: Sequence[Any], **defaults: Any) -> list[Any]:
    """Return the arguments in their order, given by position, by keyword or as their default."""
    names = list(defaults)
    return [given[i] if i < len(given) else node.kwargs.get(n, defaults[n]) for i, n in enumerate(names)]
