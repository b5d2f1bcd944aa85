"""Model → graph: `torch.export` with named, typed, symbolically sized inputs and outputs."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from .. import attention  # noqa: F401 - programs call the operator of attention
from ..errors import NotUsableError, UsageError
from ..silence_logs import quiet
from ..spec import DTYPE_NAMES, TensorSpec
from . import in_place
from .program import Graph


def capture(
    module: nn.Module,
    inputs: tuple[TensorSpec, ...],
    samples: Mapping[str, Tensor],
    *,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    outputs: tuple[str, ...] = (),
    task: str = "tensors",
) -> Graph:
    """Export `module` (called by keyword) with the symbolic sizes that `inputs` name.

    `sizes` bounds them (default 1…4096). Raises `UsageError` when the names are not the model's own and
    `NotUsableError` with the exporter's reason when the model can't be captured.
    """
    _check_names(module, inputs)
    bounds = {d: (1, 4096) for s in inputs for d in s.shape if isinstance(d, str)} | dict(sizes or {})
    used = {d for s in inputs for d in s.shape if isinstance(d, str)}
    dims = {
        name: Dim(name, min=low, max=high)
        for name, (low, high) in bounds.items()
        if name in used and low < high
    }
    shapes = {s.name: {i: dims[d] for i, d in enumerate(s.shape) if d in dims} for s in inputs}
    examples = {s.name: _at_least_two(samples[s.name], s) for s in inputs}
    with quiet(), torch.no_grad():
        try:
            program = torch.export.export(module, (), examples, dynamic_shapes=shapes, strict=False)
            program, wrote_inputs = in_place.functionalize(program)
            if wrote_inputs:
                in_place.copy_inputs(module)
        except NotUsableError:
            raise
        except Exception as error:
            raise NotUsableError(
                f"the model can't be captured with inputs {', '.join(s.format() for s in inputs)}: {_reason(error)}",
                hint="Give a size that must not vary as a number, for example --input x=float32[1,3,224,224]",
            ) from error
    program._example_inputs = _zeros(program)  # of shapes alone: no row of anybody's data stays in a program
    given = _outputs(program, inputs, outputs)
    _drop_other_outputs(program)
    return Graph(inputs, given, samples, {d: bounds[d] for d in used}, program=program, task=task)


def _check_names(module: nn.Module, inputs: tuple[TensorSpec, ...]) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for spec in inputs:
        if spec.name not in known:
            raise UsageError(
                f"the model has no input named {spec.name!r}",
                hint=f"Its forward takes: {', '.join(known)}. Name it with --input {known[0] if known else 'x'}=…",
            )


def in_dtype(module: nn.Module, inputs: tuple[TensorSpec, ...], dtype: torch.dtype) -> nn.Module:
    """Wrap `module` to compute in `dtype` (float16, bfloat16); float inputs and outputs stay float32."""
    names = [spec.name for spec in inputs]

    def forward(self: nn.Module, *args: Tensor, **named: Tensor) -> Any:
        given = {**dict(zip(names, args, strict=False)), **named}
        cast = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()
        }
        return pytree.tree_map_only(Tensor, _to_float32, self.model(**cast))  # type: ignore[operator]

    # The exporter reads the names of the inputs from the signature.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper = type("InDtype", (nn.Module,), {"forward": forward})()
    wrapper.model = module.to(dtype)
    return wrapper


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _at_least_two(sample: Tensor, spec: TensorSpec) -> Tensor:
    """Repeat sizes below 2 along symbolic axes: the exporter takes 0 and 1 as constants."""
    for axis, size in enumerate(spec.shape):
        if isinstance(size, str) and sample.shape[axis] < 2:
            sample = sample.repeat_interleave(2, dim=axis)
    return sample[:2].contiguous() if spec.shape and isinstance(spec.shape[0], str) else sample


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:600] or type(error).__name__


def _outputs(
    program: ExportedProgram, inputs: tuple[TensorSpec, ...], names: tuple[str, ...]
) -> tuple[TensorSpec, ...]:
    signature, nodes = program.graph_signature, {n.name: n for n in program.graph.nodes}
    symbols: dict[str, str] = {}
    for spec, node in zip(inputs, signature.user_inputs, strict=True):
        for size, actual in zip(spec.shape, nodes[str(node)].meta["val"].shape, strict=True):
            if isinstance(size, str):
                symbols[str(actual)] = size
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


def _drop_other_outputs(program: ExportedProgram) -> None:
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
    return re.sub(r"[A-Za-z_]\w*", lambda m: symbols.get(m[0], m[0]), str(size))


def _zeros(program: ExportedProgram) -> Any:
    """Replace the program's example inputs by zeros of the same shapes and strides."""
    return pytree.tree_map_only(Tensor, torch.zeros_like, program.example_inputs)
