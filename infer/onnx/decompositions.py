"""Decomposition of `infer::` operators before the ONNX export: int8 and table layers become symbolic nodes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import traceback

from .. import kernels
from ..kernels.ops.coded_weight import LUT, CodedWeight
from ..kernels.ops.conv2d_int8 import output_size
from .layers import paged_attention_node, recurrent_nodes
from .layers.operands import uniform_step
from .rewrite import DOMAIN

MOST_EXPERTS = 16  # of a float layer, all of which an ONNX graph computes

INT8 = tuple(f"{layer}_int8{kind}" for layer in ("linear", "conv2d") for kind in ("", "_weight", "_static"))
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
TABLE_LINEAR, TABLE_EMBEDDING = "linear_codes", "embedding_codes"  # in the layout `lut`
_lock = threading.RLock()


@dataclass(frozen=True)
class Reader:
    """Library that reads an exported file: the operators of `infer` that stay nodes, to be written by its rules.

    `any_embedding`: embeddings of any table stay nodes, not only where every table of the program is uniform.
    `plain_masks`: attention with a mask is written in plain operators (`masked_attention`).
    """

    nodes: frozenset[str] = frozenset((*INT8, TABLE_LINEAR))
    any_embedding: bool = False
    plain_masks: bool = True


RUNTIMES = Reader()  # ONNX Runtime and OpenVINO: what is exported for one serves the other


def refused(nodes: Iterable[torch.fx.Node]) -> str | None:
    """Return the reason why quantized layers among a program's nodes can't become ONNX operators, or None."""
    calls = [node for node in nodes if node.op == "call_function"]
    return _experts_refused(calls) or _codes_refused(calls)


def _experts_refused(nodes: Sequence[torch.fx.Node]) -> str | None:
    layers = [node for node in nodes if str(node.target).startswith(f"{DOMAIN}.linear_experts")]
    quantized = [node for node in layers if str(node.target) != f"{DOMAIN}.linear_experts.default"]
    if quantized:
        return f"ONNX has no operator for {len(quantized)} layers of quantized experts; use --backend inductor or eager"
    most = max((node.args[2].meta["val"].shape[0] for node in layers), default=0)  # type: ignore[union-attr]
    if most > MOST_EXPERTS:
        return (
            f"an ONNX graph computes every expert for every token; {most} experts are more than {MOST_EXPERTS}: "
            "use --backend inductor or eager"
        )
    return None


def _codes_refused(nodes: Sequence[torch.fx.Node]) -> str | None:
    names = tuple(f"{DOMAIN}.{name}.default" for name in (TABLE_LINEAR, TABLE_EMBEDDING))
    coded = [node for node in nodes if str(node.target) in names]
    count = sum(_weight_of(node).layout != LUT for node in coded)
    if not count:
        return None
    return (
        f"ONNX has no operator for {count} layers on the codes of the source; --quant float decodes them, and backends "
        "eager and inductor compute with them"
    )


def _weight_of(node: torch.fx.Node) -> CodedWeight:
    """Return the shapes of a coded layer's weight."""
    given = zip(CodedWeight._fields, node.args[1:], strict=False)
    return CodedWeight.of({name: arg.meta["val"] for name, arg in given if isinstance(arg, torch.fx.Node)})


def needed(program: ExportedProgram, reader: Reader) -> bool:
    """Return whether a program has `infer::` operators, or attention with masks, to decompose for a reader."""
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    has_own = any(name.startswith((f"{DOMAIN}.", "aten.index.Tensor")) for name in called)
    return has_own or (reader.plain_masks and has_masks(program))


def decompose(
    program: ExportedProgram, reader: Reader, others: Mapping[Any, Callable[..., Any]] | None = None
) -> ExportedProgram:
    """Decompose `infer::` operators and attention with masks, and what `others` has decompositions for: ours come
    first. Without `others` a program that has none is returned as it is.
    """
    if not needed(program, reader):
        return program if others is None else program.run_decompositions(dict(others))
    with paged_attention_node.functional(program):
        return program.run_decompositions({**(others or {}), **_decompositions(program, reader)})


@contextlib.contextmanager
def within_export(reader: Reader) -> Iterator[bool]:
    """Let torch's exporter decompose our operators together with those that it has no form for.

    It traces the whole program to decompose it, half of the time of an export: one trace in place of two. Yields False
    where torch has another exporter (its function is a private one); then `decompose` comes before the export.
    """
    passes, tables = _exporter_modules()
    if passes is None:
        yield False
        return

    def decomposed(program: ExportedProgram, registry: Any) -> ExportedProgram:
        known = set(tables.get_onnx_implemented_overloads(registry))
        return decompose(program, reader, tables.create_onnx_friendly_decomposition_table(known))

    with _lock:
        usual = passes.decompose_with_registry
        passes.decompose_with_registry = decomposed
        try:
            yield True
        finally:
            passes.decompose_with_registry = usual


def _exporter_modules() -> tuple[Any, Any]:
    """Return the modules of torch's exporter with its decomposition and its table; None where they are others."""
    try:
        from torch.onnx._internal.exporter import _decomp, _fx_passes
    except ImportError:
        return None, None
    names = ("get_onnx_implemented_overloads", "create_onnx_friendly_decomposition_table")
    complete = hasattr(_fx_passes, "decompose_with_registry") and all(hasattr(_decomp, n) for n in names)
    return (_fx_passes, _decomp) if complete else (None, None)


def _decompositions(program: ExportedProgram, reader: Reader) -> dict[Any, Callable[..., Any]]:
    """Build the decompositions of one program: int8 layers to symbolic nodes, other operators to torch."""
    table: dict[Any, Callable[..., Any]] = dict(kernels.decompositions())
    if reader.plain_masks:
        table[ATTENTION] = masked_attention
    kept = set(reader.nodes)
    if reader.any_embedding or _has_uniform_embeddings(program):
        kept.add(TABLE_EMBEDDING)
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    for op in called:
        if isinstance(op, OpOverload) and op.namespace == DOMAIN and op._opname == paged_attention_node.TWIN:
            table[op] = paged_attention_node.symbol
        elif (
            isinstance(op, OpOverload)
            and op.namespace == DOMAIN
            and op._opname == paged_attention_node.WRITTEN
        ):
            table[op] = paged_attention_node.written_symbol
        elif isinstance(op, OpOverload) and op.namespace == DOMAIN and op._opname in kept:
            table[op] = _symbol(op, op._opname)
    table[torch.ops.infer.recurrent.default] = recurrent_nodes.symbol
    table[torch.ops.aten.index.Tensor] = _index
    return table


def _has_uniform_embeddings(program: ExportedProgram) -> bool:
    """Return true if every embedding table is uniform, so that ONNX Runtime has an operator for all."""
    stored = {**program.state_dict, **program.constants}
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    nodes = [n for n in program.graph.nodes if str(n.target) == f"{DOMAIN}.{TABLE_EMBEDDING}.default"]
    tables = [stored.get(str(names.get(str(node.args[3])))) for node in nodes]
    return bool(tables) and all(t is not None and uniform_step(t.float().numpy()) is not None for t in tables)


def _index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """Decompose indexing by int32, for which the exporter writes a GatherND that ONNX forbids."""
    if all(index is None or index.dtype != torch.int32 for index in indices):
        return NotImplemented
    first = indices[0]
    if len(indices) == 1 and first is not None:
        return x.index_select(0, first.reshape(-1)).reshape(*first.shape, *x.shape[1:])
    wide = [index.long() if index is not None and index.dtype == torch.int32 else index for index in indices]
    return torch.ops.aten.index.Tensor(x, wide)


def _symbol(op: OpOverload, name: str) -> Callable[..., torch.Tensor]:
    """Build the replacement of `infer::name`: one node of the domain `infer`, tensors in schema order.

    Parts that a coded weight does not have are left out.
    """
    schema = op._schema.arguments

    def symbol(*args: Any, **named: Any) -> torch.Tensor:
        arguments: dict[str, Any] = {argument.name: argument.default_value for argument in schema}
        arguments |= dict(zip(arguments, args, strict=False)) | named
        names = [argument.name for argument in schema if "Tensor" in str(argument.type)]
        tensors = [arguments[n] for n in names if arguments[n] is not None or n not in CodedWeight._fields]
        x, codes = tensors[:2]
        dtype = x.dtype
        attributes: dict[str, Any] = {}
        if name.startswith("linear"):
            shape: Any = (*x.shape[:-1], codes.shape[0])
        elif name == TABLE_EMBEDDING:
            shape, dtype = (*x.shape, CodedWeight.of(arguments).columns), torch.float32
        elif name == "embedding_int8":
            shape, dtype = (*x.shape, codes.shape[1]), arguments["scale"].dtype
        else:
            options: dict[str, Any] = {
                key: _pair(arguments[key]) for key in ("stride", "padding", "dilation")
            }
            # By its formula: of a convolution that is traced for its shape alone, the file would hold the convolution.
            sizes = output_size(x.shape[2:], codes.shape[2:], *options.values())
            shape = (x.shape[0], codes.shape[0], *sizes)
            attributes = {**options, "groups": arguments["groups"]}
        node = f"{DOMAIN}::{name}"
        return torch.onnx.ops.symbolic(node, tensors, attributes, dtype=dtype, shape=shape, version=1)

    return symbol


def _pair(value: int | list[int] | tuple[int, ...]) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def has_masks(program: ExportedProgram) -> bool:
    """Return True if an attention of the program has a mask."""
    return any(
        node.target is ATTENTION and _mask(node.args, node.kwargs) is not None for node in program.graph.nodes
    )


def _mask(args: Any, named: Any) -> Any:
    return args[3] if len(args) > 3 else named.get("attn_mask")


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with a mask, bool or float; leaves it alone without one.

    query [..., T, D], key [..., S, D], value [..., S, E], mask [..., T, S] → [..., T, E]. A query that sees no key gets
    zeros, as in torch, whose exporter writes the lowest finite number where a boolean mask is false, so that it gets
    the mean of all values; where a float mask is -inf it gets NaN, which the next layer spreads over all tokens.
    Queries of padding see nothing where attention is local (ModernBERT), and behind a mask both causal and of keys.
    """
    if attn_mask is None or dropout_p or is_causal:
        return NotImplemented
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    factor = query.shape[-1] ** -0.25 if scale is None else scale**0.5
    scores = (query * factor) @ (key * factor).transpose(-2, -1)
    if attn_mask.dtype == torch.bool:
        hidden = attn_mask.logical_not()
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    else:
        hidden = attn_mask == -torch.inf
        scores = scores + attn_mask
    out = scores.softmax(-1).masked_fill(hidden, 0.0) @ value
    return out.transpose(1, 2).contiguous().transpose(1, 2) if _heads_are_columns() else out


def _heads_are_columns() -> bool:
    """Return True if the captured output lies as [batch, T, heads, E], as torch's fused kernels write it.

    The program may view it so; `_fused_sdp_choice` does not tell, since it says MATH for every fake tensor.
    """
    captured = traceback.get_current_meta().get("val")
    return captured is not None and captured.dim() == 4 and captured.stride(2) != captured.shape[3]
