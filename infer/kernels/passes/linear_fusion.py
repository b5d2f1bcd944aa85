"""Portable quantized linear layers → packed native ones, in a captured program that is lowered for the CPU.

Layers that read the same input (q, k and v; gate and up) become one call.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from .. import cpu
from ..cpu.weight_layout import (
    BALANCED,
    CODES,
    INT8,
    WEIGHT,
    Layer,
    Packing,
    operand_shapes,
    pack_vectors,
    packed_from,
    sizes,
)
from .graph_pass import Rewriter

KINDS = {
    "infer.linear_codes.default": CODES,
    "infer.linear_int8.default": INT8,
    "infer.linear_int8_static.default": INT8,
    "infer.linear_int8_weight.default": WEIGHT,
}


class LinearRewriter(Rewriter):
    """Rewriter that also swaps quantized linear layers; what they are packed from is in `packings`."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program)
        self.packings: list[Packing] = []

    def pack_linear(self) -> None:
        """Replace every quantized linear layer whose weights are tensors of the program."""
        groups: dict[tuple[object, ...], list[tuple[fx.Node, Layer]]] = {}
        for node in self._graph.nodes:
            found = self._layer(node)
            if found is None:
                continue
            kind, layer = found
            source = node.args[0]
            if kind == INT8 and layer.x_scale is None and (balanced := self._balanced(node)) is not None:
                kind, (source, multiplier) = BALANCED, balanced
                layer = msgspec.structs.replace(layer, names={**layer.names, "x_multiplier": multiplier})
            form = (layer.columns, layer.group, layer.layout)
            key = (kind, source, *form, self._step(layer), self._multiplier(layer))
            groups.setdefault(key, []).append((node, layer))
        for shared, members in groups.items():
            self._replace(str(shared[0]), members)
        self._drop_unused()

    def _layer(self, node: fx.Node) -> tuple[str, Layer] | None:
        """Return what to pack for this node; None for other operators, devices, dtypes and computed operands."""
        kind = KINDS.get(str(node.target)) if node.op == "call_function" else None
        if kind is None or node.meta["val"].device.type != "cpu" or node.meta["val"].dtype == torch.float64:
            return None
        names = self._names_of(node)
        if not names or "" in names.values():
            return None
        if kind == WEIGHT and self._tensors[names["codes"]].dtype != torch.int8:  # the 16 bits of fp16
            return None
        return packed_from(kind, names, self._tensors)

    def _step(self, layer: Layer) -> float | None:
        return None if layer.x_scale is None else float(self._tensors[layer.x_scale])

    def _balanced(self, node: fx.Node) -> tuple[fx.Node, str] | None:
        """Return x and the vector's name, where a layer's input is float32 x times a vector of the program."""
        product = node.args[0]
        if not isinstance(product, fx.Node) or product.target != torch.ops.aten.mul.Tensor:
            return None
        x, vector = product.args
        if not isinstance(x, fx.Node) or not isinstance(vector, fx.Node) or vector.name not in self._names:
            return None
        name, given, kept = self._names[vector.name], x.meta["val"], vector.meta["val"]
        fits = given.dtype == kept.dtype == torch.float32 and tuple(kept.shape) == tuple(given.shape[-1:])
        return (x, name) if fits and name in self._tensors else None

    def _multiplier(self, layer: Layer) -> bytes | None:
        return None if layer.x_multiplier is None else self._tensors[layer.x_multiplier].numpy().tobytes()

    def _replace(self, kind: str, members: list[tuple[fx.Node, Layer]]) -> None:
        packing = Packing(f"packed_{len(self.packings)}", kind, tuple(layer for _, layer in members))
        self.packings.append(packing)
        first = members[0][0]
        x: Any = first.args[0]  # as it is now: another layer that was replaced may have made it
        x = x.args[0] if kind == BALANCED else x
        given = x.meta["val"]
        operands = self._operands(packing, given)
        features = packing.out_features
        step: list[fx.Node | None] = []
        if kind == INT8:
            static, name = members[0][1].x_scale is not None, f"{packing.name}_x_scale"
            step = [self._operand(name, (1,), torch.float32, given) if static else None]
        if kind == BALANCED:
            columns = (members[0][1].columns,)
            step = [self._operand(f"{packing.name}_x_multiplier", columns, torch.float32, given)]
        bias = operands.pop() if packing.has_bias else None
        # Inductor writes a vector of up to eight numbers into its code: these have their values from the start.
        self._state |= pack_vectors(packing, self._tensors)
        op = getattr(torch.ops.infer, f"linear_{kind}_packed").default
        with self._graph.inserting_before(first):
            values = self._cast(x, torch.float32)
            last = sizes(kind, packing.layers[0], features)
            whole = self._graph.call_function(op, (values, *operands, *step, bias, *last))
            whole.meta = {
                **first.meta,
                "val": given.new_empty((*given.shape[:-1], features), dtype=torch.float32),
            }
            for start, (node, layer) in zip(packing.starts, members, strict=True):
                part = whole if len(members) == 1 else self._slice(whole, start, layer.rows)
                part = self._cast(part, node.meta["val"].dtype)
                node.replace_all_uses_with(part)
        for node, _ in members:
            product: Any = node.args[0]
            self._graph.erase_node(node)
            if product is not x and not product.users:
                self._graph.erase_node(product)

    def _operands(self, packing: Packing, like: Tensor) -> list[fx.Node]:
        count = sum(cpu.blocks(layer.rows) for layer in packing.layers)
        shapes = operand_shapes(packing.kind, packing.layers[0], count)
        if packing.has_bias:
            shapes["bias"] = ((packing.out_features,), torch.float32)
        return [self._operand(f"{packing.name}_{part}", *shape, like) for part, shape in shapes.items()]
