"""Nodes of the domain `infer` in an exported model become operators of the library that reads it, by its rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import NotUsableError
from ..graph_builder import GraphBuilder, drop_unused

if TYPE_CHECKING:
    import onnx_ir as ir

    # Writes one node; returns its output, and the form in which the layer computes, "" of a node that is no layer.
    Rule = Callable[[GraphBuilder], tuple[ir.Value, str]]
    Rewriter = Callable[[ir.Model], "RewriteResult"]

DOMAIN = "infer"


@dataclass
class RewriteResult:
    """Number of layers by written form, and names of the weights left in float."""

    forms: Counter[str] = field(default_factory=Counter)
    in_float: list[str] = field(default_factory=list)


def rewrite(model: ir.Model, rules: Mapping[str, Rule]) -> RewriteResult:
    """Rewrite every node of the domain `infer` by the rule of its operator, in place; other nodes stay."""
    done = RewriteResult()
    for node in list(model.graph):
        if node.domain != DOMAIN:
            continue
        if node.op_type not in rules:
            raise NotUsableError(
                f"infer::{node.op_type} has no ONNX form",
                where=str(node.name),
                hint="Use --backend inductor or eager",
            )
        emit = GraphBuilder(model.graph, node)
        output, form = rules[node.op_type](emit)
        emit.replace(output)
        if form:
            done.forms[form] += 1
        if "in float" in form:
            done.in_float.append(emit.weight_name)
    drop_unused(model.graph)
    model.opset_imports.pop(DOMAIN, None)
    return done
