"""`infer::attend_paged` on its way to ONNX: made functional, decomposed to a node of the domain `infer`.

The backend `ort` writes that node in ONNX operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ...attention import ARGUMENTS, KV_DTYPES
from ...errors import NotUsableError
from ...kernels import library

NAME, TWIN, WRITTEN = "attend_paged", "attend_paged_value", "output_of_encoder"


def attention_nodes(nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
    """List the attention nodes of a step among all of its nodes, layer by layer."""
    return [node for node in nodes if str(node.target) == f"infer.{NAME}.default"]


def kv_dtype(nodes: Iterable[torch.fx.Node]) -> str | None:
    """Return the dtype of a step's cache, given its nodes, else None."""
    layers = attention_nodes(nodes)
    return KV_DTYPES[_named(layers[0])["dtype"]] if layers else None


@contextmanager
def functional(program: ExportedProgram) -> Iterator[None]:
    """Make the operator functional, so that `run_decompositions` leaves it one node."""
    nodes = attention_nodes(program.graph.nodes)
    if nodes and not hasattr(torch.ops.infer, TWIN):
        library().define(f"{TWIN}({ARGUMENTS.replace('(a!)', '')}) -> Tensor")
        torch.library.register_fake(f"infer::{TWIN}", _shape, lib=library())
        library().define(f"{WRITTEN}(Tensor output, Tensor[] written) -> Tensor")
        torch.library.register_fake(f"infer::{WRITTEN}", _shape, lib=library())
    for node in nodes:
        node.target = getattr(torch.ops.infer, TWIN).default
    try:
        with _used(program, [node for node in nodes if not node.users]):
            yield
    finally:
        for node in nodes:
            node.target = getattr(torch.ops.infer, NAME).default


@contextmanager
def _used(program: ExportedProgram, nodes: list[torch.fx.Node]) -> Iterator[None]:
    """Make an encoder's output depend on its cache writes, which the exporter would otherwise drop."""
    if not nodes:
        yield
        return
    end = program.graph.output_node()
    [spec] = [
        output for output in program.graph_signature.output_specs if output.kind == OutputKind.USER_OUTPUT
    ]
    [output] = [node for node in end.all_input_nodes if node.name == spec.arg.name]
    with program.graph.inserting_before(end):
        written = program.graph.call_function(getattr(torch.ops.infer, WRITTEN).default, (output, nodes))
    written.meta["val"] = output.meta["val"]
    end.replace_input_with(output, written)
    spec.arg.name = written.name
    try:
        yield
    finally:
        end.replace_input_with(written, output)
        spec.arg.name = output.name
        program.graph.erase_node(written)


def written_symbol(output: Tensor, written: list[Tensor]) -> Tensor:
    """Build the node of the domain `infer` for the output of an encoder."""
    return torch.onnx.ops.symbolic(
        f"infer::{WRITTEN}", [output, *written], dtype=output.dtype, shape=tuple(output.shape), version=1
    )


def symbol(*args: Any) -> Tensor:
    """Build the replacement node of the domain `infer`; its last input is the bias, if there is one."""
    named: dict[str, Any] = dict(zip(_PARAMETERS, args, strict=False))
    if named.pop("chunk", 0):
        raise NotUsableError(
            "attention in chunks has no ONNX form here", hint="Use --backend eager or inductor"
        )
    bias = named.pop("slopes", None)
    tensors = [v for v in named.values() if isinstance(v, Tensor)]
    query, key = named["query"], named["key"]
    attributes = {n: v for n, v in named.items() if not isinstance(v, Tensor) and v is not None}
    attributes |= {
        "group": query.shape[1] // key.shape[1],
        "kv_heads": key.shape[1],
        "head_dim": key.shape[2],
        "bias": 0 if bias is None else bias.dim(),
        "distances": 0 if bias is None or bias.dim() == 1 else bias.shape[1],
    }
    return torch.onnx.ops.symbolic(
        *(f"infer::{NAME}", [*tensors, *([] if bias is None else [bias])], attributes),
        **{"dtype": query.dtype, "shape": tuple(query.shape), "version": 1},
    )


_PARAMETERS = tuple(part.split()[1].partition("=")[0] for part in ARGUMENTS.split(", "))


def _named(node: torch.fx.Node) -> dict[str, Any]:
    return dict(zip(_PARAMETERS, node.args, strict=False))


def _shape(query: Tensor, *rest: object) -> Tensor:
    return query.new_empty(query.shape)
