"""Devices that a captured program depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree


def devices_in(program: ExportedProgram) -> dict[str, set[str]]:
    """Return the devices that a program depends on, each with where: weights, constants, operators, metadata."""
    found: dict[str, set[str]] = {}

    def note(where: str, value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                found.setdefault(leaf.device.type, set()).add(where)
            elif isinstance(leaf, torch.device):
                found.setdefault(leaf.type, set()).add(where)

    for name, value in {**program.state_dict, **program.constants}.items():
        note(name, value)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            note(f"{node.name} ({node.target})", (list(node.args), dict(node.kwargs)))
            note(f"metadata of {node.name}", node.meta.get("val"))
            if node.op == "get_attr":
                note(str(node.target), getattr(module, str(node.target), None))
    return found
