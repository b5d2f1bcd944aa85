"""Portable layers of experts → packed native ones, in a captured program that is lowered for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .. import cpu
from ..cpu.weight_layout import CODES, INT8, WEIGHT, ExpertsPacking, operand_shapes, packed_from, sizes
from ..ops.coded_weight import CodedWeight
from .graph_pass import Rewriter

KINDS = {
    "infer.linear_experts_codes.default": CODES,
    "infer.linear_experts_int8.default": INT8,
    "infer.linear_experts_int8_weight.default": WEIGHT,
}


class ExpertsRewriter(Rewriter):
    """Rewriter that also swaps the layers of experts; what they are packed from is in `experts`."""

    experts: list[ExpertsPacking]

    def pack_experts(self) -> None:
        """Replace every layer of experts whose weights are tensors of the program."""
        self.experts = []
        for node in list(self._graph.nodes):
            if (packing := self._experts_packing(node)) is not None:
                self.experts.append(packing)
                self._replace_experts(node, packing)
        self._drop_unused()

    def _experts_packing(self, node: fx.Node) -> ExpertsPacking | None:
        kind = KINDS.get(str(node.target)) if node.op == "call_function" else None
        if kind is None or node.meta["val"].device.type != "cpu" or node.meta["val"].dtype == torch.float64:
            return None
        names = {name: found for name, found in self._names_of(node).items() if name in CodedWeight._fields}
        if not names or "" in names.values():
            return None
        features = int(self._argument(node, "features"))
        kind, layer = packed_from(kind, names, self._tensors)
        return ExpertsPacking(f"experts_{len(self.experts)}", kind, layer, features)

    def _argument(self, node: fx.Node, name: str) -> Any:
        given = node.normalized_arguments(self._module, normalize_to_only_use_kwargs=True)  # type: ignore[arg-type]
        return given.kwargs[name] if given else None

    def _replace_experts(self, node: fx.Node, packing: ExpertsPacking) -> None:
        x, expert, top_k = (self._argument(node, name) for name in ("x", "expert", "top_k"))
        result: Tensor = node.meta["val"]
        blocks = packing.num_experts * cpu.blocks(packing.features)
        operands = [
            self._operand(f"{packing.name}_{part}", shape, dtype, result)
            for part, (shape, dtype) in operand_shapes(packing.kind, packing.layer, blocks).items()
        ]
        numbers = (*sizes(packing.kind, packing.layer, packing.features), top_k)
        op = getattr(torch.ops.infer, f"linear_experts_{packing.kind}_packed").default
        with self._graph.inserting_before(node):
            values = self._cast(x, torch.float32)
            whole = self._graph.call_function(op, (values, expert, *operands, *numbers))
            whole.meta = {**node.meta, "val": result.new_empty(result.shape, dtype=torch.float32)}
            node.replace_all_uses_with(self._cast(whole, result.dtype))
        self._graph.erase_node(node)
