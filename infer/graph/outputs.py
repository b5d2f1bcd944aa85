"""Names and shapes of the outputs of a captured program."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from ..errors import NotUsableError, UsageError
from ..spec import DTYPE_NAMES, TensorSpec


def output_specs(
    program: ExportedProgram, inputs: tuple[TensorSpec, ...], names: tuple[str, ...]
) -> tuple[TensorSpec, ...]:
    """Return name, dtype and shape of each output tensor; symbolic sizes are named as those of the inputs.

    Raises `UsageError` for another number of `names` than outputs and `NotUsableError` for outputs that no
    artifact can hold.
    """
    signature, nodes = program.graph_signature, {n.name: n for n in program.graph.nodes}
    symbols: dict[str, str] = {}
    for spec, node in zip(inputs, signature.user_inputs, strict=True):
        for size, actual in zip(spec.shape, nodes[str(node)].meta["val"].shape, strict=True):
            if isinstance(size, str):
                symbols[str(actual)] = size
                if times := re.fullmatch(r"(\d+)\*(\w+)", str(actual)):  # a size that a number divides
                    symbols[times[2]] = f"({size}//{times[1]})"
    given = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    are_tensors = [
        isinstance(argument, TensorArgument) for argument in given
    ]  # others are left away, as `flatten` does
    values = [nodes[argument.name].meta["val"] for argument in given if isinstance(argument, TensorArgument)]
    if not values:
        raise NotUsableError("the model returns no tensor", hint="Return the tensors that it computes")
    for index, value in enumerate(values):
        if value.dtype not in DTYPE_NAMES:
            raise NotUsableError(
                f"output {index} of the model is of dtype {str(value.dtype).removeprefix('torch.')}",
                hint=f"Return one of {', '.join(DTYPE_NAMES.values())}; torch.view_as_real gives both parts of "
                "a complex tensor",
            )
    names = names or _output_names(program, are_tensors)
    if len(names) != len(values):
        raise UsageError(f"expected {len(values)} output names, got {len(names)}: {', '.join(names)}")
    return tuple(
        TensorSpec(name, DTYPE_NAMES[value.dtype], tuple(_named(size, symbols) for size in value.shape))
        for name, value in zip(names, values, strict=True)
    )


def _output_names(program: ExportedProgram, are_tensors: list[bool]) -> tuple[str, ...]:
    spec, count = program.call_spec.out_spec, sum(are_tensors)
    if spec is not None and spec.type is dict and len(spec.context) == len(are_tensors):
        keys = tuple(str(key) for key, kept in zip(spec.context, are_tensors, strict=True) if kept)
        if all(keys) and len(set(keys)) == len(keys):  # 1 and "1" are two keys
            return keys
    return ("output",) if count == 1 else tuple(f"output_{i}" for i in range(count))


def drop_other_outputs(program: ExportedProgram) -> None:
    """Take the outputs that are no tensors (numbers, strings, sizes) from a program.

    ONNX can't express them, and torch can't load a saved program that returns a string.
    """
    signature, graph = program.graph_signature, program.graph
    kept = [
        spec.kind is not OutputKind.USER_OUTPUT or isinstance(spec.arg, TensorArgument)
        for spec in signature.output_specs
    ]
    if all(kept):
        return
    output = next(node for node in graph.nodes if node.op == "output")
    values: Any = output.args[0]
    output.args = (tuple(itertools.compress(values, kept)),)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    specs = list(itertools.compress(signature.output_specs, kept))
    program._graph_signature = replace(signature, output_specs=specs)
    whole = program.module_call_graph[0]
    if whole.signature is not None:
        tree = pytree.tree_structure((0,) * len(program.graph_signature.user_outputs))
        whole.signature = replace(whole.signature, out_spec=tree)


def _named(size: int | torch.SymInt, symbols: Mapping[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    if str(size) in symbols:
        return symbols[str(size)]
    return re.sub(r"[A-Za-z_]\w*", lambda m: symbols.get(m[0], m[0]), str(size))
