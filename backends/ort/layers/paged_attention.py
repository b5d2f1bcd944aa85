"""Attention over a paged KV cache in plain ONNX operators, for ONNX Runtime on CPUs.

ONNX Runtime's own PagedAttention has no CPU kernel, and GroupQueryAttention wants each sequence's cache in one piece.
So `infer::attend_paged` becomes: new keys and values are scattered into the layer's pages, the pages of each sequence
gathered, two products and a softmax between them. One layer's cache is a graph input `cache_I` and an output
`cache_I_new` of [pages * 2 * kv_heads, page, head_dim]; both are bound to the same memory, ScatterND then writes
nothing but the new rows. What was a flat run of tokens is, for attention, a batch padded to its longest sequence, right
aligned; the indices that say so are inputs, which `step_runner` makes:

    scattered int64 [tokens kept]                     which tokens are written
    slots     int64 [tokens kept * 2 * kv_heads, 2]   row and place of their keys, then values, head after head
    padded    int64 [batch, longest]                  a token for each place, 0 where there is none
    flat      int64 [tokens]                          a place for each token
    pages     int64 [batch, kv_heads, blocks]         rows of the keys; those of the values are kv_heads further
    mask_W    float32 [batch, 1, group * longest, blocks * page], one for each window W (0: none): 0 or `HIDDEN`
    distances int64 [batch, longest, blocks * page]   of a key before its query, where the model has a bias by distance
    places    float32 [batch, 1, 1, blocks * page]    of a key, 0 for the last token, where the model has ALiBi

The decoder of an encoder-decoder also reads pages of its sources, and its encoder writes them without reading:

    source_pages int64 [batch, kv_heads, source_blocks]
    source_mask  float32 [batch, 1, 1, source_blocks * page]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from infer.attention import KV_DTYPES
from infer.errors import NotUsableError
from infer.onnx.rewrite import GraphBuilder

if TYPE_CHECKING:
    import onnx_ir as ir

KEY = "infer_step"  # of the model's metadata: a `StepForm`
HIDDEN = -1e30  # finite: a row of padding sees nothing, and must not become NaN
_RANKS = {
    **{"scattered": 1, "slots": 2, "padded": 2, "flat": 1, "pages": 3, "source_pages": 3, "distances": 3},
    **{"source_mask": 4, "places": 4},
}
_OLD = ("slot_mapping", "block_table", "query_start", "seq_lens", "kv_cache", "source_table", "source_lens")


class StepForm(msgspec.Struct, frozen=True):
    """Parameters from which the inputs of a written step are built."""

    layers: int
    page: int
    kv_heads: int
    group: int
    head_dim: int
    kv_dtype: str
    windows: tuple[int, ...]


def attend(emit: GraphBuilder) -> tuple[ir.Value, str]:
    """Write the operators of one layer, with its cache among the graph's inputs and outputs."""
    slots = emit.node.inputs[5]
    table = "" if slots is None else slots.name
    if table == "source_table":
        return _attention(emit, _cache(emit), "source_pages", "source_mask"), ""
    written = _write(emit)
    if table != "block_table":  # an encoder: its keys and values are written, not read
        return emit("Identity", emit.node.inputs[0]), ""
    return _attention(emit, written, "pages", f"mask_{_attributes(emit)['window']}"), ""


def _attributes(emit: GraphBuilder) -> dict[str, Any]:
    return {name: emit.node.attributes[name].value for name in emit.node.attributes}


def _cache(emit: GraphBuilder) -> ir.Value:
    """Return the cache of a layer, an input of the graph."""
    at = _attributes(emit)
    return _input(emit.graph, f"cache_{at['layer']}", _kind(at), ["cache_rows", at["page"], at["head_dim"]])


def _kind(at: Mapping[str, Any]) -> ir.DataType:
    import onnx_ir as ir

    return ir.DataType[KV_DTYPES[at["dtype"]].upper().replace("FLOAT32", "FLOAT")]


def _step_input(emit: GraphBuilder, name: str) -> ir.Value:
    """Return the graph input of that name, added if absent: indices int64, masks and places float32."""
    import onnx_ir as ir

    kind = ir.DataType.FLOAT if name in ("source_mask", "places") else ir.DataType.INT64
    return _input(emit.graph, name, kind, [None] * _RANKS[name])


def _shaped(emit: GraphBuilder, value: ir.Value, *sizes: int) -> ir.Value:
    shape: ir.Value = emit.constant(f"const/shape/{sizes}", np.array(sizes, np.int64))
    done: ir.Value = emit("Reshape", value, shape)
    return done


def _write(emit: GraphBuilder) -> ir.Value:
    """Write the new keys and values into a layer's cache; returns the cache after it, an output of the graph."""
    at, cache = _attributes(emit), _cache(emit)
    key, value = emit.node.inputs[1:3]
    new = emit("Gather", emit("Concat", key, value, axis=1), _step_input(emit, "scattered"), axis=0)
    new = emit("Cast", _shaped(emit, new, -1, at["head_dim"]), to=int(_kind(at)))
    written: ir.Value = emit("ScatterND", cache, _step_input(emit, "slots"), new)
    written.name = f"cache_{at['layer']}_new"
    written.type, written.shape = cache.type, cache.shape
    emit.graph.outputs.append(written)
    return written


def _attention(emit: GraphBuilder, cache: ir.Value, pages: str, mask: str) -> ir.Value:
    """Attend to the keys and values of `pages` in a layer's cache, both names of inputs."""
    import onnx_ir as ir

    at = _attributes(emit)
    heads, group, width = at["kv_heads"], at["group"], at["head_dim"]

    def gathered(rows: ir.Value) -> ir.Value:
        taken = _shaped(emit, emit("Gather", cache, rows, axis=0), 0, heads, -1, width)
        return emit("Cast", taken, to=int(ir.DataType.FLOAT))

    rows_of_keys = _step_input(emit, pages)
    hidden = (
        _step_input(emit, mask)
        if mask in _RANKS
        else _input(emit.graph, mask, ir.DataType.FLOAT, [None, 1, None, None])
    )
    keys = gathered(rows_of_keys)
    values = gathered(emit("Add", rows_of_keys, emit.scalar(heads, np.int64)))
    rows = emit("Gather", emit.node.inputs[0], _step_input(emit, "padded"), axis=0)
    rows = emit("Transpose", _shaped(emit, rows, 0, 0, heads, group, width), perm=[0, 2, 3, 1, 4])
    rows = _shaped(emit, rows, 0, heads, -1, width)
    scores = emit(
        "MatMul", emit("Mul", rows, emit.scalar(at["scale"])), emit("Transpose", keys, perm=[0, 1, 3, 2])
    )
    if at["softcap"]:
        cap = emit.scalar(at["softcap"])
        scores = emit("Mul", emit("Tanh", emit("Div", scores, cap)), cap)
    if at["bias"]:
        each = emit("Add", _shaped(emit, scores, 0, heads * group, -1, 0), _bias(emit))
        scores = _shaped(emit, each, 0, heads, -1, 0)
    weights = emit("Softmax", emit("Add", scores, hidden), axis=-1)
    mixed = _shaped(emit, emit("MatMul", weights, values), 0, heads, group, -1, width)
    mixed = _shaped(emit, emit("Transpose", mixed, perm=[0, 3, 1, 2, 4]), -1, heads * group, width)
    done: ir.Value = emit("Gather", mixed, _step_input(emit, "flat"), axis=0)
    return done


def _bias(emit: GraphBuilder) -> ir.Value:
    """Return what is added to the logits, float32 [batch, heads, longest or 1, keys]."""
    import onnx_ir as ir

    at = _attributes(emit)
    slopes = emit("Cast", emit.node.inputs[-1], to=int(ir.DataType.FLOAT))
    if at["bias"] == 1:
        done: ir.Value = emit("Mul", _shaped(emit, slopes, 1, -1, 1, 1), _step_input(emit, "places"))
        return done
    last = emit.scalar(at["distances"] - 1, np.int64)
    rows = emit("Gather", slopes, emit("Min", _step_input(emit, "distances"), last), axis=1)
    by_distance: ir.Value = emit("Transpose", rows, perm=[1, 0, 2, 3])
    return by_distance  # noqa: RET504


def finish(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Remove the inputs of the paged form after all layers, and store how the new ones are built."""
    import onnx_ir.passes.common as passes

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
        layers=len({node.attributes["layer"].value for node in nodes}),
        page=at["page"],
        kv_heads=at["kv_heads"],
        group=at["group"],
        head_dim=at["head_dim"],
        kv_dtype=KV_DTYPES[at["dtype"]],
        windows=tuple(sorted({node.attributes["window"].value for node in nodes})),
    )
    passes.RemoveUnusedNodesPass()(model)  # that made arguments of the operator
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
    """Return the graph input `name`, added if absent; sizes None become symbolic."""
    import onnx_ir as ir

    for value in graph.inputs:
        if value.name == name:
            return value
    named = [f"{name}_{i}" if size is None else size for i, size in enumerate(shape)]
    value = ir.val(name, kind, named)
    graph.inputs.append(value)
    return value
