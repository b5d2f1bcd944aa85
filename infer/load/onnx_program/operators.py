"""Table of operators: (domain, type, first version) → function of torch tensors.

A function is called with its node and the node's inputs, absent ones as None, and returns one value or a tuple. It
holds from its `since` on, up to the next entry of the same operator. The source of each is ONNX's operator
specification (onnx.ai/onnx/operators), of domain com.microsoft that of ONNX Runtime (docs/ContribOperators.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .values import torch_dtype

MICROSOFT = "com.microsoft"
REDUCTIONS = tuple(
    f"Reduce{kind}"
    for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
)


@dataclass(frozen=True)
class Operator:
    """An implementation; `sizes` are the inputs that it takes as lists of numbers."""

    run: Callable[..., Any]
    since: int
    sizes: frozenset[int] = frozenset()


@dataclass
class Node:
    """A node of the graph as its function sees it."""

    op: str
    domain: str
    name: str
    version: int  # opset of its domain
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    constants: dict[int, Tensor] = field(
        default_factory=dict
    )  # inputs that are the same in every call, at import
    known: dict[int, list[Any]] = field(default_factory=dict)  # the values of those of them that are few
    types: dict[int, int] = field(
        default_factory=dict
    )  # inputs of 4 and 2 bits, which torch holds in 8: their type
    blocks: dict[str, Any] = field(default_factory=dict)  # subgraphs by attribute

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or its default."""
        return self.attributes.get(name, default)

    def dtype(self, name: str, default: torch.dtype | None = None) -> torch.dtype:
        """Return an attribute that names a dtype."""
        number = self.attributes.get(name)
        return default if number is None and default is not None else torch_dtype(int(number or 1))

    def wants(self, index: int) -> bool:
        """Return true where an output is read."""
        return index < len(self.outputs) and bool(self.outputs[index])


# Inputs that are attributes in older versions of an operator: their places.
MOVED: dict[str, dict[str, int]] = {
    "Clip": {"min": 1, "max": 2},
    "DFT": {"axis": 2},
    "Pad": {"pads": 1, "value": 2},
    "Slice": {"starts": 1, "ends": 2, "axes": 3},
    "Split": {"split": 1},
    "TopK": {"k": 1},
    "Upsample": {"scales": 1},
    **dict.fromkeys(("Squeeze", "Unsqueeze", *REDUCTIONS), {"axes": 1}),
}
OPERATORS: dict[tuple[str, str], list[Operator]] = {}
ON_SIZES: dict[str, Callable[..., Any]] = {}


def operator(
    *names: str, since: int = 1, domain: str = "", sizes: tuple[int, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function under one or more names."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            entries = OPERATORS.setdefault((domain, name), [])
            entries.append(Operator(function, since, frozenset(sizes)))
            entries.sort(key=lambda entry: entry.since)
        return function

    return enter


def on_sizes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function of sizes, which returns None where it has no form of them: then tensors are computed."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        ON_SIZES.update(dict.fromkeys(names, function))
        return function

    return enter


def find(domain: str, op: str, version: int) -> Operator | None:
    """Return the implementation of an operator at a version of its domain, or None."""
    entries = OPERATORS.get(("" if domain == "ai.onnx" else domain, op), [])
    return next((entry for entry in reversed(entries) if entry.since <= version), None)
