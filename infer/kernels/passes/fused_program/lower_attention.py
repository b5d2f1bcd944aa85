"""Lowering of attention and rotary embeddings to operations of a fused program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .graph_reader import GraphReader, arguments
from .match import is_call
from .operations import Operation
from .values import BATCH, COLUMNS, HEADS, TEAM, TOKENS

aten = torch.ops.aten


def rotate(reader: GraphReader, node: Any) -> Operation | None:
    """Lower rotary embeddings of heads; None where the operands are no views of the same rows."""
    x, cos, sin = reader.view(node.args[0]), reader.rows(node.args[1]), reader.rows(node.args[2])
    if x is None or cos is None or sin is None or x.axes[-1] != COLUMNS or HEADS not in x.axes:
        return None
    if len({x.value.domain, cos.value.domain, sin.value.domain}) > 1 or cos.width % 2:
        return None
    # Positions are given for every head: their axis of heads has one.
    return Operation("rotate", [x, cos, sin], reader.result(node, x), [cos.width])


def attend(reader: GraphReader, node: Any) -> Operation | None:
    """Lower attention over a paged KV cache; None for ALiBi, chunks and operands from outside."""
    query, key, value = views = [reader.view(n) for n in node.args[:3]]
    read = list(node.args[4:8])
    sinks, layer, page, dtype, scale, window, softcap, *more = node.args[8:]
    if any(argument is not None and argument != 0 for argument in more):
        return None  # ALiBi or chunks: the operator by itself
    if query is None or key is None or value is None or not reader.in_program(query.value.node):
        return None
    if any(view is None or view.axes != (TOKENS, HEADS, COLUMNS) for view in views):
        return None
    sizes = [query.heads, key.heads, query.width, layer, window, page, dtype]
    result = reader.result(node, replace(query, stride=query.width), TEAM)
    return Operation("attend", [query, key, value], result, sizes, [sinks], [scale, softcap], read)


def attend_all(reader: GraphReader, node: Any) -> Operation | None:
    """Lower `scaled_dot_product_attention` of whole sequences; None for masks and heads the program has no form of."""
    views = [reader.view(n) for n in node.args[:3]]
    mask, dropout, causal = arguments(node, node.args[3:], attn_mask=None, dropout_p=0.0, is_causal=False)
    query, key, value = views
    if query is None or key is None or value is None or dropout or not reader.in_program(query.value.node):
        return None
    if any(v.axes != (BATCH, HEADS, TOKENS, COLUMNS) for v in (query, key, value)):
        return None
    if (
        len({v.value.domain for v in (query, key, value)}) > 1
        or len({v.width for v in (query, key, value)}) > 1
    ):
        return None
    grouped = query.heads != key.heads
    if grouped and (not node.kwargs.get("enable_gqa") or query.heads % key.heads) or key.heads != value.heads:
        return None
    read: list[fx.Node] = []
    seen = [0, 0, 0]
    if mask is not None:
        found = _mask(mask, query.value.domain.split(","))
        if found is None:
            return None
        read, seen = [found[0]], found[1]
    scale = node.kwargs.get("scale")
    numbers = [query.width**-0.5 if scale is None else float(scale)]
    sizes = [query.heads, key.heads, query.width, *seen, int(causal)]
    result = reader.result(node, replace(query, stride=query.width), TEAM)
    return Operation("attend_all", [query, key, value], result, sizes, [], numbers, read)


def _mask(node: Any, lead: list[str]) -> tuple[fx.Node, list[int]] | None:
    """Return the mask shared by all heads, and flags (float, per batch, per row); None if it can't be lowered."""
    while is_call(node, aten.expand.default):
        node = node.args[0]
    tensor = node.meta["val"]
    batch, head, row, column = (str(size) for size in tensor.shape) if tensor.dim() == 4 else ("",) * 4
    if head != "1" or column != lead[1] or batch not in ("1", lead[0]) or row not in ("1", lead[1]):
        return None
    if tensor.dtype not in (torch.bool, torch.float32) or tensor.device.type != "cpu":
        return None
    return node, [int(tensor.dtype == torch.float32), int(batch != "1"), int(row != "1")]
