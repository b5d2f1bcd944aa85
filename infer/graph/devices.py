"""A copy of a captured program for another device.

Programs are captured on the CPU, and the device stands in them: in their weights and constants, in operators that make
tensors (`aten.arange`), move them (`aten.to`) or check them (`aten._assert_tensor_metadata`), and in the metadata that
a compiler takes its target from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from ..library_errors import quiet


def moved(program: ExportedProgram, device: str) -> ExportedProgram:
    """Return a copy of `program` whose every tensor, operator and piece of metadata is on `device`.

    The original is left as it is, and shares its weights with a copy for the device that they are on.
    """
    with quiet():
        copied = move_to_device_pass(_copy(program), device)
    target = torch.device(device)
    for module, node in _nodes(copied):
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, lambda _: target, (node.args, node.kwargs)
        )
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            # `cuda` is not `cuda:0`, where every tensor is: dtype and layout are still checked.
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
        if node.op == "get_attr" and isinstance(value := getattr(module, str(node.target), None), Tensor):
            setattr(module, str(node.target), value.to(target))
    for module in copied.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return copied


def _nodes(program: ExportedProgram) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                yield module, node


def _copy(program: ExportedProgram) -> ExportedProgram:
    """Copy a program without its weights: graph, and the dicts that name the tensors."""
    copied = copy.copy(program)
    copied._graph_module = copy.deepcopy(program.graph_module)
    for (_, old), (_, new) in zip(_nodes(program), _nodes(copied), strict=True):
        new.name = old.name  # copying renames placeholders that have the name of a builtin, such as `input`
    copied._state_dict, copied._constants = dict(program.state_dict), dict(program.constants)
    return copied
