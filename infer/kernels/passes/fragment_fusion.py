"""Portable 4-bit linear layers → layers in the order of tensor-core fragments, in a program for an NVIDIA GPU.

Layers that read the same input (q, k and v; gate and up) become one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...spec import Finding
from ..gpu.fragment_packing import FragmentLayer, FragmentPacking, pack
from ..ops.bitpack import GROUP
from ..ops.coded_weight import LUT
from ..ops.linear_lut4_fragments import is_integers, uniform_zero
from .graph_pass import Rewriter

LAYER = "infer.linear_codes.default"
HALVES = (torch.float16, torch.bfloat16)


class _Fragments(Rewriter):
    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program)
        self.packings: list[FragmentPacking] = []

    def pack_linear(self) -> None:
        """Replace every 4-bit layer of a half-precision input whose weights are tensors of the program."""
        groups: dict[tuple[object, ...], list[tuple[fx.Node, FragmentLayer]]] = {}
        for node in self._graph.nodes:
            if (layer := self._layer(node)) is not None:
                groups.setdefault((node.args[0], *self._form(layer).values()), []).append((node, layer))
        for members in groups.values():
            self._replace(members)
        self._drop_unused()

    def _layer(self, node: fx.Node) -> FragmentLayer | None:
        """Return what to pack for this node; None for other operators, dtypes, formats and computed operands."""
        if node.op != "call_function" or str(node.target) != LAYER or node.meta["val"].dtype not in HALVES:
            return None
        names = self._names_of(node)
        if not names or "" in names.values() or "table" not in names:
            return None
        layer = FragmentLayer(names, self._tensors[names["codes"]].shape[0])
        weight = layer.weight(self._tensors)
        of_rows = weight.layout == LUT and weight.group == GROUP
        plain = weight.super_scale is None and weight.group % GROUP == 0
        return layer if weight.bits == 4 and (of_rows or plain) else None

    def _form(self, layer: FragmentLayer) -> dict[str, Any]:
        """Return the key of layers that share a call: columns, group size, dtypes of scales and minima."""
        weight = layer.weight(self._tensors)
        minimum = None if weight.minimum is None else weight.minimum.dtype
        minima = torch.float32 if minimum == torch.int8 else minimum  # steps of the scale become numbers
        return {
            "columns": weight.columns,
            "group": weight.group,
            "factors": None if weight.layout == LUT else str(weight.scale.dtype).removeprefix("torch."),
            "minima": None if minima is None else str(minima).removeprefix("torch."),
        }

    def _replace(self, members: list[tuple[fx.Node, FragmentLayer]]) -> None:
        layers = tuple(layer for _, layer in members)
        form = self._form(layers[0])
        tables = [self._tensors[layer.names["table"]].cpu() for layer in layers]
        if form["factors"] is None:
            uniform = all(uniform_zero(table) is not None for table in tables)
        else:  # its scales can't take the step of a table
            uniform = all(is_integers(table) for table in tables)
        name = f"fragments_{len(self.packings)}"
        packing = FragmentPacking(name, layers, uniform=uniform, **form)
        self.packings.append(packing)
        first = members[0][0]
        x: Any = first.args[0]  # as it is now: another layer that was replaced may have made it
        given, features = x.meta["val"], packing.out_features
        operands = {
            part: self._operand(f"{packing.name}_{part}", *shape, given)
            for part, shape in packing.shapes.items()
        }
        bias, minimum = operands.pop("bias", None), operands.pop("minimum", None)
        with self._graph.inserting_before(first):
            whole = self._graph.call_function(
                torch.ops.infer.linear_lut4_fragments.default,
                (x, *operands.values(), bias, features, uniform, minimum),
            )
            whole.meta = {**first.meta, "val": given.new_empty((*given.shape[:-1], features))}
            for start, (node, layer) in zip(packing.starts, members, strict=False):
                part = whole if len(members) == 1 else self._slice(whole, start, layer.rows)
                node.replace_all_uses_with(part)
        for node, _ in members:
            self._graph.erase_node(node)


def plan_fragments(program: ExportedProgram) -> tuple[ExportedProgram, list[FragmentPacking]]:
    """Return a program that calls `linear_lut4_fragments`, and the packing of its operands.

    The input stays as it is.
    """
    rewriter = _Fragments(program)
    rewriter.pack_linear()
    return rewriter.program(), rewriter.packings


def packed(program: ExportedProgram) -> ExportedProgram:
    """Return `program` with 4-bit layers packed into fragments, as plain torch runs it on a GPU."""
    planned, packings = plan_fragments(program)
    planned._state_dict = {
        **planned.state_dict,
        **pack(packings, {**program.state_dict, **program.constants}),
    }
    return planned


def findings(packings: list[FragmentPacking]) -> list[Finding]:
    """Report the number of layers and of the calls that they were fused to."""
    count = sum(len(packing.layers) for packing in packings)
    why = f"4-bit weights in the order of tensor-core fragments, in {len(packings)} calls"
    return [Finding("lower", "fragment layers", count, "layers", why)] if count else []
