"""Functionalization of in-place operators in captured programs.

Passes over a program follow values, not memory: an operator that writes into its operand would be lost. Only operators
whose operand has no other reader are renamed here; programs with others are functionalized by torch, except for
decode steps, which write their cache: those keep what is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from ..errors import NotUsableError
from ..library_errors import quiet

_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION)
# Operators whose result is memory of its own.
_FRESH = frozenset(
    """
    linear conv1d conv2d conv3d batch_norm layer_norm group_norm rms_norm add sub mul div neg matmul bmm mm addmm cat
    relu relu6 hardtanh leaky_relu elu silu gelu sigmoid tanh hardswish hardsigmoid mish softplus clamp exp sqrt rsqrt
    embedding conv_transpose1d conv_transpose2d clone linear_int8 linear_int8_static linear_int8_weight
    linear_codes embedding_codes
    conv2d_int8 conv2d_int8_static conv2d_int8_weight
    """.split()  # noqa: SIM905 - a word is an operator
)


def functionalize(program: ExportedProgram) -> tuple[ExportedProgram, bool]:
    """Return `program` without in-place writes, and true if it wrote into its inputs.

    Raises `NotUsableError` when an output depends on a buffer that the program writes: an answer would depend on the
    calls before it.
    """
    graph = program.graph
    for node in [node for node in graph.nodes if _writes(node)]:
        _rename(graph, node)
    if has_writes(program) and not any(_is_mutable(node) and not _writes(node) for node in graph.nodes):
        with quiet():
            program = program.run_decompositions({})
    else:
        program.graph_module.recompile()
    specs = program.graph_signature.output_specs
    wrote_inputs = any(spec.kind is OutputKind.USER_INPUT_MUTATION for spec in specs)
    return _without_writes(program), wrote_inputs


def has_writes(program: ExportedProgram) -> bool:
    """Return true if torch operators write into their operands; `infer` operators (paged cache) may."""
    return any(_writes(node) for node in program.graph.nodes)


def copy_inputs(module: nn.Module) -> None:
    """Wrap a module that mutates its inputs so that it mutates copies."""
    module.register_forward_pre_hook(_with_copies, with_kwargs=True)


def _with_copies(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    copied: tuple[Any, Any] = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
    return copied


def _writes(node: fx.Node) -> bool:
    return _is_mutable(node) and node.target.namespace == "aten"  # type: ignore[union-attr]


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _rename(graph: fx.Graph, node: fx.Node) -> None:
    """Replace `relu_` by `relu` where the operand is only seen through its own name."""
    target: Any = node.target
    value = node.args[0] if node.args else None
    name = target._schema.name.removeprefix("aten::")
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    if plain is None or target._overloadname not in plain.overloads() or not isinstance(value, fx.Node):
        return
    dtype = value.meta["val"].dtype
    if any(n.meta["val"].dtype != dtype for n in node.all_input_nodes if _is_tensor(n)):
        return  # the plain operator would promote
    places = {n: i for i, n in enumerate(graph.nodes)}
    before = [user for user in value.users if places[user] < places[node]]
    if not _is_fresh(value) or not all(_is_fresh(user) for user in before):
        return
    node.target = getattr(plain, target._overloadname)
    for user in [user for user in value.users if places[user] > places[node]]:
        user.replace_input_with(value, node)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_fresh(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and target._schema.name.partition("::")[2] in _FRESH
    )


def _without_writes(program: ExportedProgram) -> ExportedProgram:
    """Remove outputs that a functionalized program only writes back into inputs and buffers."""
    signature, graph = program.graph_signature, program.graph
    if not any(spec.kind in _WRITES for spec in signature.output_specs):
        return program
    output = next(node for node in graph.nodes if node.op == "output")
    pairs = list(zip(signature.output_specs, output.args[0], strict=True))  # type: ignore[arg-type]
    kept = [(spec, value) for spec, value in pairs if spec.kind not in _WRITES]
    held = {target: name for name, target in signature.inputs_to_buffers.items()}
    read = _ancestors([value for _, value in kept if isinstance(value, fx.Node)])
    for spec, _ in pairs:
        if spec.kind is OutputKind.BUFFER_MUTATION and held.get(str(spec.target)) in read:
            raise NotUsableError(
                f"the model changes its buffer {spec.target!r} when it is called and its outputs depend on it: "
                "an answer would depend on the requests before",
                hint="Take the state out of the module: make it an input and an output",
            )
    output.args = (tuple(value for _, value in kept),)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    program._graph_signature = replace(signature, output_specs=[spec for spec, _ in kept])
    return program


def _ancestors(nodes: list[fx.Node]) -> set[str]:
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return {node.name for node in seen if node.op == "placeholder"}
