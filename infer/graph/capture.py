"""Model → graph: `torch.export` with named, typed, symbolically sized inputs and outputs."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from .. import attention  # noqa: F401 - programs call the operator of attention
from ..errors import NotUsableError, UsageError
from ..library_errors import quiet
from ..named_inputs import NamedInputs
from ..sanitize import shortened
from ..spec import BATCH, DTYPE_NAMES, TensorSpec
from . import captured_layers, functionalize
from .program import TorchGraph

MOST_LINE, MOST_REASON = 160, 400  # characters of a line of code, and of what the exporter says


def capture(
    module: nn.Module,
    inputs: tuple[TensorSpec, ...],
    samples: Mapping[str, Tensor],
    *,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    outputs: tuple[str, ...] = (),
    task: str = "tensors",
    multiples: Mapping[str, int] | None = None,
    asserts: bool = False,
) -> TorchGraph:
    """Export `module` (called by keyword) with the symbolic sizes that `inputs` name.

    `sizes` bounds them (default 1…4096), `multiples` names those that some number divides. `asserts`: guards that the
    exporter can't prove within them are checked at each call of the graph instead of refused. Raises `UsageError` when
    the names are not the model's own and `NotUsableError` with the exporter's reason when the model can't be captured.
    """
    check_input_names(module, inputs)
    used = {d for s in inputs for d in s.shape if isinstance(d, str)}
    steps = {name: step for name, step in (multiples or {}).items() if name in used}
    bounds = dict.fromkeys(used, (1, 4096)) | dict(sizes or {})
    bounds |= {d: (-(-bounds[d][0] // n) * n, bounds[d][1] // n * n) for d, n in steps.items()}
    dims = {
        name: Dim(name, min=low, max=high)
        if (step := steps.get(name, 1)) == 1
        else step * Dim(f"_{name}", min=low // step, max=high // step)
        for name, (low, high) in bounds.items()
        if name in used and low < high
    }
    shapes = {s.keyword: {i: dims[d] for i, d in enumerate(s.shape) if d in dims} for s in inputs}
    examples = {s.name: _example(samples[s.name], s, dims, bounds, steps) for s in inputs}
    with quiet(logging.CRITICAL), torch.no_grad():  # a failure becomes a sentence
        try:
            # torch prints the graph of a failed export
            with (
                contextlib.redirect_stderr(io.StringIO()),
                _without_stack_traces(),
                captured_layers.padded_encoders(),
                captured_layers.recurrent(),
            ):
                arguments = {s.keyword: examples[s.name] for s in inputs}
                program = torch.export.export(
                    module, (), arguments, dynamic_shapes=shapes, strict=False,
                    prefer_deferred_runtime_asserts_over_guards=asserts,
                )  # fmt: skip
            if captured_layers.uses_packing():
                captured_layers.drop_unread(program.graph)
            program, wrote_inputs = functionalize.functionalize(program)
            if wrote_inputs:
                functionalize.copy_inputs(module)
        except NotUsableError:
            raise
        except Exception as error:
            raise _refusal(error, inputs, examples) from error
    _drop_stack_traces(program)
    program._example_inputs = _zeros(program)  # zeros of the same shapes: no sample data is stored
    named = output_specs(program, inputs, outputs)
    drop_other_outputs(program)
    sized = {d: bounds[d] for d in used}
    return TorchGraph(inputs, named, samples, sized, task, steps, program=program, asserts=asserts)


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
    arguments = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    are_tensors = [
        isinstance(argument, TensorArgument) for argument in arguments
    ]  # others are left away, as `flatten` does
    values = [
        nodes[argument.name].meta["val"] for argument in arguments if isinstance(argument, TensorArgument)
    ]
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


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Disable torch's formatting of a Python stack trace for every operator, where this version has the option."""
    before = getattr(fx.config, "do_not_emit_stack_traces", None)
    if before is not None:
        fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        if before is not None:
            fx.config.do_not_emit_stack_traces = before


def _drop_stack_traces(program: ExportedProgram) -> None:
    """Remove the source lines of every operator, so that an artifact contains no local paths."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


def check_input_names(module: nn.Module, inputs: tuple[TensorSpec, ...], remedy: str = "") -> None:
    """Raise `UsageError` for an input that the module's forward does not take by that name; `remedy` is its advice."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    free = [name for name in known if name not in {spec.keyword for spec in inputs}] or known or ["x"]
    for spec in inputs:
        if spec.keyword not in known:
            raise UsageError(
                f"the model has no input named {spec.name!r}",
                hint=f"Its forward takes: {', '.join(known)}. "
                + (remedy or f"Name it with --input {TensorSpec(free[0], spec.dtype, spec.shape).format()}"),
            )
    wanted = {spec.keyword for spec in inputs}
    needed = [p.name for p in parameters if p.name in known and p.default is inspect.Parameter.empty]
    if inputs and (absent := [name for name in needed if name not in wanted]):
        raise UsageError(
            f"the model's forward takes {absent[0]!r} too",
            hint=remedy
            or f"Name it with --input {TensorSpec(absent[0], inputs[0].dtype, inputs[0].shape).format()}",
        )


def in_dtype(module: nn.Module, inputs: tuple[TensorSpec, ...], dtype: torch.dtype) -> nn.Module:
    """Wrap `module` to compute in `dtype` (float16, bfloat16); float inputs and outputs stay float32."""

    def call(model: nn.Module, arguments: Mapping[str, Tensor]) -> Any:
        cast = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments.items()
        }
        return pytree.tree_map_only(Tensor, _to_float32, model(**cast))

    return wrapped("InDtype", module.to(dtype), [spec.keyword for spec in inputs], call)


class _Wrapper(NamedInputs):
    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Mapping[str, Tensor]], Any]) -> None:
        super().__init__()
        self.model, self.compute = model, call
        self.training = model.training

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        return self.compute(self.model, tensors)


def wrapped(
    kind: str,
    model: nn.Module,
    names: Sequence[str],
    call: Callable[[nn.Module, Mapping[str, Tensor]], Any],
) -> nn.Module:
    """Wrap `model` in a module, of a class called `kind`, whose forward takes tensors by `names` and returns what
    `call` makes of the model and them.
    """
    return _Wrapper(model, call).taking(names, kind)


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _example(
    sample: Tensor,
    spec: TensorSpec,
    dims: Mapping[str, Any],
    bounds: Mapping[str, tuple[int, int]],
    steps: Mapping[str, int],
) -> Tensor:
    """Return an input to capture with: fixed sizes as they are, two or more of others, which 0 and 1 would fix."""
    for axis, size in enumerate(spec.shape):
        if isinstance(size, str):
            fewest = bounds[size][0]  # of rows two are enough, and quickest
            step = steps.get(size, 1)
            wanted = max(2 * step, fewest) if size in dims else fewest
            if sample.shape[axis] < wanted:
                sample = sample.repeat_interleave(-(-wanted // max(sample.shape[axis], 1)), dim=axis)
            if size == BATCH or size not in dims:
                sample = sample.narrow(axis, 0, wanted)
            elif step > 1:
                sample = sample.narrow(axis, 0, sample.shape[axis] // step * step)
    return sample.contiguous()


def line_of_model(error: BaseException | None) -> str:
    """Return the line of the model's own code that raised, `net.py:12: return y if y.sum() > 0 else -y`, or ""."""
    others = {Path(__file__).resolve().parents[1], Path(os.__file__).resolve().parent}
    place = ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            path = Path(frame.filename)
            installed = {"site-packages", "dist-packages"} & set(path.parts)
            if path.suffix == ".py" and not installed and not others & set(path.resolve().parents):
                place = f"{path.name}:{frame.lineno}" + (f": {frame.line}" if frame.line else "")
        error = error.__cause__
    return place


def _refusal(
    error: Exception, inputs: tuple[TensorSpec, ...], examples: Mapping[str, Tensor]
) -> NotUsableError:
    """Build the error that names the line or size that can't be captured, and the option to give instead."""
    text, line = str(error), line_of_model(error)
    asked = ", ".join(spec.format() for spec in inputs)
    if "data-dependent" in text:
        where = (
            f"its code asks for the value of a tensor{f' at {shortened(line, MOST_LINE)}' if line else ''}"
        )
        hint = "Write that with torch.where or torch.cond: a graph has no branches and sizes that depend on values"
        return NotUsableError(f"the model can't be captured with inputs {asked}: {where}", hint=hint)
    constant = specialized(text)
    reason = f"its code makes a constant of {' and '.join(constant)}" if constant else _reason(text)
    numbers = " ".join(
        f"--input {spec.name}={spec.dtype}[{','.join(map(str, _numbers(spec, examples[spec.name], constant)))}]"
        for spec in inputs
    )
    at = f" (at {shortened(line, MOST_LINE)})" if line else ""
    hint = f"Give what must not vary as a number: {numbers}"
    return NotUsableError(f"the model can't be captured with inputs {asked}: {reason}{at}", hint=hint)


def specialized(reason: str) -> list[str]:
    """List the symbolic sizes that the exporter's message calls constants of the model's code."""
    marked = re.findall(r"marked (\w+) as dynamic but your code specialized it to be a constant", reason)
    limited = re.findall(r"Not all values of (\w+) = .* satisfy the generated guard", reason)
    return list(dict.fromkeys([*marked, *limited]))


def _numbers(spec: TensorSpec, example: Tensor, constant: list[str]) -> tuple[int | str, ...]:
    """Return the shape with numbers for the sizes that are constants, or for all where none is known to be."""
    return tuple(
        (1 if size == BATCH else have)
        if isinstance(size, str) and (not constant or size in constant)
        else size
        for size, have in zip(spec.shape, example.shape, strict=True)
    )


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return shortened(" ".join(lines[:3]), MOST_REASON).rstrip(" :") or "no reason given"


def _zeros(program: ExportedProgram) -> Any:
    """Replace the program's example inputs by zeros of the same shapes and strides."""
    return pytree.tree_map_only(Tensor, torch.zeros_like, program.example_inputs)
