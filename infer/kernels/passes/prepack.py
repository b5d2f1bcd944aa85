"""Portable operators → packed native ones, in a captured program that is lowered for the CPU.

`plan_packing` rewrites the program; which tensors it then wants, and from which weights they are made, is a list of
`Packing`. Layers that read the same input (q, k and v; gate and up) become one call. Attention over a paged cache
takes the same arguments natively, but another page layout: all of a program's or none. Layers over a state cache take
the same arguments and the same rows.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from ...spec import Finding
from .. import cpu
from ..cpu.weight_layout import (
    BALANCED,
    INT8,
    LUT,
    PARTS,
    WEIGHT,
    WIDEST,
    AnyPacking,
    Layer,
    Packing,
    pack,
    pack_vectors,
)
from ..ops.bitpack import GROUP, bits_of, columns_of, group_of
from ..ops.state_cache import STATE_LAYERS
from .conv_fusion import fusable, fuse_convolutions
from .experts import KINDS as EXPERT_KINDS
from .experts import ExpertsRewriter
from .fused_program import partition

_KINDS = {
    "infer.linear_lut.default": LUT,
    "infer.linear_int8.default": INT8,
    "infer.linear_int8_static.default": INT8,
    "infer.linear_int8_weight.default": WEIGHT,
}
ATTENTION_REQUIRED, ATTENTION_DEFAULTS = (
    15,
    (None, 0),
)  # arguments without a default, and the defaults of the others
ATTENTION, SINKS = "infer.attend_paged.default", 8  # the place of its sinks among the arguments


def usable(program: ExportedProgram) -> bool:
    """Tell if the program has layers or attention for the native kernels, and they work here."""
    found = _wanted(program) + _attentions(program) + _state_layers(program)
    return found > 0 and cpu.why_not() is None


def _wanted(program: ExportedProgram) -> int:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    kinds = {**_KINDS, **EXPERT_KINDS}
    return sum(str(node.target) in kinds or fusable(node) for node in nodes)


def _attentions(program: ExportedProgram) -> int:
    return sum(str(node.target) == ATTENTION for node in program.graph.nodes if node.op == "call_function")


def _state_layers(program: ExportedProgram) -> int:
    return sum(_state_layer(node) is not None for node in program.graph.nodes)


def _state_layer(node: fx.Node) -> str | None:
    """Return the name of a layer over a state cache, None for other nodes."""
    name = str(node.target).removeprefix("infer.").removesuffix(".default")
    return name if node.op == "call_function" and name in STATE_LAYERS else None


def findings(program: ExportedProgram) -> list[Finding]:
    """Report the kernels of a program's quantized layers and attention on the CPU, and why."""
    counts = {"native layers": _wanted(program), "native attention": _attentions(program)}
    counts["native state"] = _state_layers(program)
    if not any(counts.values()):
        return []
    reason = cpu.why_not()
    why = f"portable operators, slower: {reason}" if reason else f"own kernels for {cpu.isa()}"
    return [
        Finding("lower", what, 0 if reason else count, "layers", why)
        for what, count in counts.items()
        if count
    ]


def packed(program: ExportedProgram, *, fuse_layers: bool = True) -> ExportedProgram:
    """`program` on packed operators, its weights packed: what plain torch runs."""
    planned, packings = plan_packing(program, fuse_layers=fuse_layers)
    made = pack(packings, {**program.state_dict, **program.constants})
    planned._state_dict = {**planned.state_dict, **made}
    return planned


def plan_packing(
    program: ExportedProgram, *, fuse_layers: bool = True
) -> tuple[ExportedProgram, list[AnyPacking]]:
    """Return a program that calls the packed operators, and what they are packed from; the input stays as it is.

    Whole layers, of the step of a language model all of them, become one call, unless `fuse_layers` is false.
    """
    program, convolutions = fuse_convolutions(program)
    rewriter = _Rewriter(program)
    rewriter.run()
    rewriter.pack_experts()
    rewriter.attend()
    rewriter.keep_state()
    program = rewriter.program()
    return partition.fuse_layers(program) if fuse_layers else program, [
        *convolutions,
        *rewriter.packings,
        *rewriter.experts,
    ]


class _Rewriter(ExpertsRewriter):
    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program)
        self.packings: list[Packing] = []

    def run(self) -> None:
        groups: dict[tuple[object, ...], list[tuple[fx.Node, Layer]]] = {}
        for node in self._graph.nodes:
            found = self._layer(node)
            if found is None:
                continue
            kind, layer = found
            source = node.args[0]
            if kind == INT8 and layer.x_scale is None and (balanced := self._balanced(node)) is not None:
                kind, (source, multiplier) = BALANCED, balanced
                layer = msgspec.structs.replace(layer, x_multiplier=multiplier)
            key = (kind, source, layer.columns, layer.group, self._step(layer), self._multiplier(layer))
            groups.setdefault(key, []).append((node, layer))
        for shared, members in groups.items():
            self._replace(str(shared[0]), members)
        self._drop_unused()

    def attend(self) -> None:
        """Replace the portable attention by the native one."""
        for node in self._graph.nodes:
            if str(node.target) != ATTENTION:
                continue
            node.target = torch.ops.infer.attend_native.default
            # In full: compiled graphs call a C function, which has no defaults.
            node.args = (*node.args, *ATTENTION_DEFAULTS[len(node.args) - ATTENTION_REQUIRED :])
            sinks = node.args[SINKS]
            if isinstance(sinks, fx.Node):
                with self._graph.inserting_before(node):
                    node.update_arg(SINKS, self._cast(sinks, torch.float32))

    def keep_state(self) -> None:
        """Replace portable layers over a state cache by the native ones."""
        for node in self._graph.nodes:
            if (name := _state_layer(node)) is not None:
                node.target = getattr(torch.ops.infer, f"{name}_native").default

    def _layer(self, node: fx.Node) -> tuple[str, Layer] | None:
        """Return what to pack for this node; None for other operators, devices, dtypes and computed operands."""
        kind = _KINDS.get(str(node.target)) if node.op == "call_function" else None
        if kind is None or node.meta["val"].device.type != "cpu" or node.meta["val"].dtype == torch.float64:
            return None
        names = self._names_of(node)
        if not names or "" in names.values():
            return None
        codes = self._tensors[names["codes"]]
        parts: dict[str, Any] = {**names, "rows": codes.shape[0], "columns": codes.shape[1]}
        if kind == LUT:
            table, scale = self._tensors[names["table"]], self._tensors[names["scale"]]
            parts["columns"] = columns_of(codes, table)
            if bits_of(table) > WIDEST:
                kind = INT8
            else:
                parts["group"] = group_of(codes, table, scale)
        return kind, Layer(**parts)

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
        last = [features] if kind == LUT else [features, members[0][1].columns]
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
        columns, group = packing.layers[0].columns, packing.layers[0].group
        quads, groups = -(-columns // 4), columns // GROUP
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "scale": ((count, cpu.ROWS), torch.float32),
            "codes": ((count, quads, cpu.ROWS, 4), torch.int8),
            "row_sum": ((count, cpu.ROWS), torch.int32),
        }
        if packing.kind == LUT:
            shapes = {
                "codes": ((count, groups, cpu.ROWS * GROUP // 2), torch.uint8),
                "scale": ((count, columns // group, cpu.ROWS), torch.int8),
                "table": ((count, cpu.ROWS), torch.int8),
                "row_scale": ((count, cpu.ROWS), torch.float32),
            }
        shapes["bias"] = ((packing.out_features,), torch.float32)
        parts = [*PARTS[packing.kind], *(["bias"] if packing.has_bias else [])]
        return [self._operand(f"{packing.name}_{part}", *shapes[part], like) for part in parts]

    def _slice(self, node: fx.Node, start: int, length: int) -> fx.Node:
        axis = node.meta["val"].dim() - 1
        part = self._graph.call_function(torch.ops.aten.slice.Tensor, (node, axis, start, start + length))
        part.meta["val"] = node.meta["val"].narrow(axis, start, length)
        return part
