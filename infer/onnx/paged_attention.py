"""Attention over a paged KV cache in plain ONNX operators, for ONNX Runtime on CPUs.

ONNX Runtime's own PagedAttention has no CPU kernel, and GroupQueryAttention wants each sequence's cache in one piece.
So `infer::attend_paged` becomes: new keys and values are scattered into the layer's pages, the pages of each sequence
gathered, two products and a softmax between them. One layer's cache is a graph input `cache_I` and an output
`cache_I_new` of [pages * 2 * kv_heads, page, head_dim]; both are bound to the same memory, ScatterND then writes
nothing but the new rows. What was a flat run of tokens is, for attention, a batch padded to its longest sequence, right
aligned; the indices that say so are inputs, which `steps.py` makes:

    scattered int64 [tokens kept]                     which tokens are written
    slots     int64 [tokens kept * 2 * kv_heads, 2]   row and place of their keys, then values, head after head
    padded    int64 [batch, longest]                  a token for each place, 0 where there is none
    flat      int64 [tokens]                          a place for each token
    pages     int64 [batch, kv_heads, blocks]         rows of the keys; those of the values are kv_heads further
    mask_W    float32 [batch, 1, group * longest, blocks * page], one for each window W (0: none): 0 or `HIDDEN`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..attention import ARGUMENTS, KV_DTYPES
from ..errors import NotUsableError
from ..kernels import library
from .graph_builder import GraphBuilder

if TYPE_CHECKING:
    import onnx_ir as ir

KEY = "infer_step"  # of the model's metadata: a `StepForm`
NAME, TWIN = "attend_paged", "attend_paged_value"
HIDDEN = -1e30  # finite: a row of padding sees nothing, and must not become NaN
_INDEXES = (("scattered", 1), ("slots", 2), ("padded", 2), ("flat", 1), ("pages", 3))
_OLD = ("slot_mapping", "block_table", "query_start", "seq_lens", "kv_cache")


class StepForm(msgspec.Struct, frozen=True):
    """Parameters from which the inputs of a written step are built."""

    layers: int
    page: int
    kv_heads: int
    group: int
    head_dim: int
    kv_dtype: str
    windows: tuple[int, ...]


def attention_nodes(program: ExportedProgram | None) -> list[torch.fx.Node]:
    """List the attention nodes of a step, layer by layer; empty for any other program."""
    nodes = [] if program is None else program.graph.nodes
    return [node for node in nodes if str(node.target) == f"infer.{NAME}.default"]


def kv_dtype(program: ExportedProgram | None) -> str | None:
    """Return the dtype of a step's cache, else None."""
    found = attention_nodes(program)
    return KV_DTYPES[_named(found[0])["dtype"]] if found else None


@contextmanager
def functional(program: ExportedProgram) -> Iterator[None]:
    """Make the operator functional, so that `run_decompositions` leaves it one node."""
    found = attention_nodes(program)
    if found and not hasattr(torch.ops.infer, TWIN):
        library().define(f"{TWIN}({ARGUMENTS.replace('(a!)', '')}) -> Tensor")
        torch.library.register_fake(f"infer::{TWIN}", _shape, lib=library())
    for node in found:
        node.target = getattr(torch.ops.infer, TWIN).default
    try:
        yield
    finally:
        for node in found:
            node.target = getattr(torch.ops.infer, NAME).default


def symbol(*args: Any) -> Tensor:
    """Build the replacement node of the domain `infer`."""
    named: dict[str, Any] = dict(zip(_PARAMETERS, args, strict=False))
    if named.pop("slopes", None) is not None or named.pop("chunk", 0):
        raise NotUsableError(
            "attention with ALiBi or in chunks has no ONNX form here", hint="Use --backend eager or inductor"
        )
    tensors = [v for v in named.values() if isinstance(v, Tensor)]
    query, key = named["query"], named["key"]
    attributes = {n: v for n, v in named.items() if not isinstance(v, Tensor) and v is not None}
    attributes |= {
        "group": query.shape[1] // key.shape[1],
        "kv_heads": key.shape[1],
        "head_dim": key.shape[2],
    }
    return torch.onnx.ops.symbolic(
        f"infer::{NAME}", tensors, attributes, dtype=query.dtype, shape=tuple(query.shape), version=1
    )


def attend(emit: GraphBuilder) -> ir.Value:
    """Write the operators of one layer, with its cache among the graph's inputs and outputs."""
    import onnx_ir as ir

    graph, node = emit.graph, emit.node
    at = {name: node.attributes[name].value for name in node.attributes}
    heads, group, width = at["kv_heads"], at["group"], at["head_dim"]
    kind = ir.DataType[KV_DTYPES[at["dtype"]].upper().replace("FLOAT32", "FLOAT")]
    given = {name: _input(graph, name, ir.DataType.INT64, [None] * rank) for name, rank in _INDEXES}
    mask = _input(graph, f"mask_{at['window']}", ir.DataType.FLOAT, [None, 1, None, None])
    cache = _input(graph, f"cache_{at['layer']}", kind, ["cache_rows", at["page"], width])

    def shaped(value: ir.Value, *sizes: int) -> ir.Value:
        return emit("Reshape", value, emit.constant(f"const/shape/{sizes}", np.array(sizes, np.int64)))

    query, key, value = node.inputs[:3]
    new = emit("Gather", emit("Concat", key, value, axis=1), given["scattered"], axis=0)
    new = emit("Cast", shaped(new, -1, width), to=int(kind))
    written = emit("ScatterND", cache, given["slots"], new)
    written.name = f"cache_{at['layer']}_new"
    written.type, written.shape = cache.type, cache.shape
    graph.outputs.append(written)

    def gathered(rows: ir.Value) -> ir.Value:
        taken = shaped(emit("Gather", written, rows, axis=0), 0, heads, -1, width)
        return emit("Cast", taken, to=int(ir.DataType.FLOAT))

    keys = gathered(given["pages"])
    values = gathered(emit("Add", given["pages"], emit.scalar(heads, np.int64)))
    rows = shaped(emit("Gather", query, given["padded"], axis=0), 0, 0, heads, group, width)
    rows = shaped(emit("Transpose", rows, perm=[0, 2, 3, 1, 4]), 0, heads, -1, width)
    scores = emit(
        "MatMul", emit("Mul", rows, emit.scalar(at["scale"])), emit("Transpose", keys, perm=[0, 1, 3, 2])
    )
    if at["softcap"]:
        cap = emit.scalar(at["softcap"])
        scores = emit("Mul", emit("Tanh", emit("Div", scores, cap)), cap)
    weights = emit("Softmax", emit("Add", scores, mask), axis=-1)
    mixed = shaped(emit("MatMul", weights, values), 0, heads, group, -1, width)
    mixed = shaped(emit("Transpose", mixed, perm=[0, 3, 1, 2, 4]), -1, heads * group, width)
    return emit("Gather", mixed, given["flat"], axis=0)


def finish(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Remove the inputs of the paged form after all layers, and store how the new ones are built."""
    at = {name: nodes[0].attributes[name].value for name in nodes[0].attributes}
    if any(
        node.attributes[name].value != at[name]
        for node in nodes
        for name in ("kv_heads", "head_dim", "group")
    ):
        raise NotUsableError(
            "layers with keys of different shapes have no ONNX form here",
            hint="Use --backend eager or inductor",
        )
    form = StepForm(
        layers=len(nodes),
        page=at["page"],
        kv_heads=at["kv_heads"],
        group=at["group"],
        head_dim=at["head_dim"],
        kv_dtype=KV_DTYPES[at["dtype"]],
        windows=tuple(sorted({node.attributes["window"].value for node in nodes})),
    )
    model.metadata_props[KEY] = msgspec.json.encode(form).decode()
    for value in list(model.graph.inputs):
        if value.name in _OLD:
            if value.uses():
                raise NotUsableError(
                    f"the model reads {value.name} outside of attention, which has no ONNX form",
                    hint="Use --backend inductor or eager",
                )
            model.graph.inputs.remove(value)


def _input(graph: ir.Graph, name: str, kind: ir.DataType, shape: list[int | str | None]) -> ir.Value:
    import onnx_ir as ir

    for value in graph.inputs:
        if value.name == name:
            return value
    named = [f"{name}_{i}" if size is None else size for i, size in enumerate(shape)]
    value = ir.val(name, kind, named)
    graph.inputs.append(value)
    return value


_PARAMETERS = tuple(part.split()[1].partition("=")[0] for part in ARGUMENTS.split(", "))


def _named(node: torch.fx.Node) -> dict[str, Any]:
    return dict(zip(_PARAMETERS, node.args, strict=False))


def _shape(query: Tensor, *rest: object) -> Tensor:
    return query.new_empty(query.shape)
