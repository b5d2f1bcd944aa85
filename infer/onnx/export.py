"""ONNX export of a graph: names and symbolic sizes of the specs, quantized layers for the library that reads it.

The linear and convolutional `infer::` operators pass through torch's exporter as symbolic nodes of the domain
`infer`; the reader's rules then write them (`rewrite`). The others are decomposed to plain torch before the
export.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from ..errors import NotUsableError
from ..graph.program import Graph
from ..library_errors import quiet
from ..spec import TensorSpec
from .decompositions import RUNTIMES, Reader, decompose, within_export

if TYPE_CHECKING:
    import onnx_ir as ir

    from .rewrite import Rewriter, RewriteResult

OPSET = 20
OPSET_CAP = 23
IR_VERSION_CAP = 10
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
# Building the table of operators takes 0.4 s of CPU (torch 2.13), four fifths of the export of a single layer.
_table_lock = threading.RLock()
_tables: dict[Any, Any] = {}  # by the arguments of `from_torchlib`


def export(
    graph: Graph, path: Path, rewriter: Rewriter, *, reader: Reader = RUNTIMES, opset: int = OPSET
) -> RewriteResult:
    """Write the graph's program to `path`, large tensors to `path`.data beside it, and check the result.

    `rewriter` writes the layers of the domain `infer`. Raises `NotUsableError` naming the operator when torch's
    exporter can't translate the program.
    """
    import onnx

    model = to_ir(graph, reader, opset=opset)
    done = rewriter(model)
    save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    return done


def to_ir(graph: Graph, reader: Reader = RUNTIMES, *, opset: int = OPSET) -> ir.Model:
    """Convert the program to an onnx_ir model; layers we write are still nodes of the domain `infer`."""
    if not 18 <= opset <= OPSET_CAP:
        raise NotUsableError(f"opset {opset} is outside what torch can export", hint=f"Use 18 to {OPSET_CAP}")
    known = _exported.setdefault(graph.exported, {})
    key = (reader, opset, graph.inputs, graph.outputs)
    if key not in known:
        known[key] = _translated(graph, graph.exported, reader, opset)
    return _copied(known[key])


# ONNX Runtime and OpenVINO take the same form, and torch's exporter takes longer than all that follows.
_exported: weakref.WeakKeyDictionary[ExportedProgram, dict[Any, ir.Model]] = weakref.WeakKeyDictionary()


def _copied(model: ir.Model) -> ir.Model:
    """Copy a model whose tensors stay shared; `ir.Model.clone` also shares the types of values, which are changed."""
    copied = model.clone()
    for graph in (copied.graph, *copied.graph.subgraphs()):
        values = [
            *graph.inputs,
            *graph.initializers.values(),
            *(output for node in graph for output in node.outputs),
        ]
        for value in values:
            value.type = copy.deepcopy(value.type)
    return copied


def _translated(graph: Graph, program: ExportedProgram, reader: Reader, opset: int) -> ir.Model:
    # With gradients a learned mask (T5) takes another kernel, of another layout.
    with _quiet(), table_built_once(), torch.no_grad(), within_export(reader) as in_one_trace:
        program = program if in_one_trace else decompose(program, reader)
        try:
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                verbose=False,
                custom_translation_table=mended_operators(),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            if (our_error := _own_error(error)) is not None:
                raise our_error from error
            raise NotUsableError(
                f"this model has no ONNX form: {_cause(error)}", hint="Use --backend inductor or eager"
            ) from error
    if exported is None:
        raise NotUsableError(
            "torch's ONNX exporter returned no model and no reason", hint="Use --backend inductor or eager"
        )
    model = exported.model
    model.ir_version = min(model.ir_version, IR_VERSION_CAP)
    _strip(model)
    _type_folded(model)
    _name_ends(model, _user_inputs(program, graph), output_names(graph.inputs, graph.outputs))
    _name_sizes(model, graph.inputs, graph.outputs)
    return model


def _type_folded(model: ir.Model) -> None:
    """Give weights of convolutions the type of the activations: the exporter folds 16-bit BatchNorms into float32."""
    import onnx_ir as ir

    for node in model.graph:
        low = node.inputs[0].dtype if node.op_type in ("Conv", "ConvTranspose") and node.inputs[0] else None
        if low not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            continue
        for value in node.inputs[1:]:
            if value is not None and value.const_value is not None and value.dtype == ir.DataType.FLOAT:
                array = value.const_value.numpy().astype(low.numpy())
                value.const_value, value.dtype = ir.tensor(array, dtype=low, name=value.name), low


def output_names(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> list[str]:
    """Return the output names in the file: those of the specs, except where an input has that name."""
    of_inputs = {spec.name for spec in inputs}
    taken = of_inputs | {spec.name for spec in outputs}
    names = []
    for spec in outputs:
        name = spec.name
        while name in of_inputs or (name != spec.name and name in taken):
            name += "_output"
        taken.add(name)
        names.append(name)
    return names


def _name_ends(model: ir.Model, inputs: list[str], outputs: list[str]) -> None:
    """Set the names of inputs and outputs in order; inner values of the same name are renamed first.

    The exporter renames an input that the program also returns.
    """
    ends = [*model.graph.inputs, *model.graph.outputs]
    names = [*inputs, *outputs]
    computed = [value for node in model.graph for value in node.outputs]
    values = {id(v): v for v in (*ends, *computed, *model.graph.initializers.values())}
    for index, value in enumerate(values.values()):
        if value.name in names:
            value.name = f"{value.name}_inner_{index}"
    for name, value in zip(names, ends, strict=True):
        value.name = name


def save(model: ir.Model, path: Path) -> None:
    """Write `path` and one file of tensors beside it, aligned so that the runtime can map it."""
    import onnx_ir as ir

    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, path, external_data=path.name + ".data")


def folder_bytes(path: Path) -> int:
    """Sum the bytes in the folder of an ONNX file: the file and its external data."""
    return sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())


def opset(path: Path) -> int:
    """Return the model's operator set version."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _user_inputs(program: ExportedProgram, graph: Graph) -> list[str]:
    """List the names of the inputs, in the program's order."""
    names, known = [spec.name for spec in graph.inputs], [*map(str, program.graph_signature.user_inputs)]
    return known if sorted(known) == sorted(names) else names


def _strip(model: ir.Model) -> None:
    """Remove the exporter's metadata about its machine: stack traces, paths, module names."""
    for holder in (model, model.graph, *model.graph, *model.graph.initializers.values()):
        holder.metadata_props.clear()
        holder.doc_string = None


def _name_sizes(model: ir.Model, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Rename torch's symbols (`s31`) in every shape to the names of the specs (`batch`)."""
    import onnx_ir as ir

    values = {str(value.name): value for value in model.graph.inputs}
    names: dict[str, str] = {}
    for spec in inputs:
        for want, have in zip(spec.shape, values[spec.name].shape or (), strict=True):
            if isinstance(want, str) and isinstance(have, ir.SymbolicDim):
                names[str(have.value)] = want
    for value in (*model.graph.inputs, *(out for node in model.graph for out in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, names) for dim in value.shape])
    for spec, value in zip(outputs, model.graph.outputs, strict=True):
        value.shape = ir.Shape(list(spec.shape))


def _renamed(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        return None
    return _SYMBOL.sub(lambda match: names.get(match[0], match[0]), str(dim.value))


def _own_error(error: BaseException | None) -> NotUsableError | None:
    """Return the refusal of one of our decompositions that an exception of the exporter hides; None where none does."""
    while error is not None and not isinstance(error, NotUsableError):
        error = error.__cause__
    return error


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost exception, which names the operator."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output and logs of the exporter: progress, deprecations inside torch, missing torchvision."""
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def table_built_once() -> Iterator[None]:
    """Let exports in this context share the exporter's table of operators; of a torch without one nothing changes."""
    kind = _registry_class()
    if kind is None:
        yield
        return
    with _table_lock:
        usual = kind.__dict__["from_torchlib"]

        def shared(cls: Any, *args: Any, **named: Any) -> Any:
            key = (cls, args, tuple(sorted(named.items())))
            if key not in _tables:
                _tables[key] = usual.__get__(None, cls)(*args, **named)
            return _copied_table(_tables[key])

        kind.from_torchlib = classmethod(shared)
        try:
            yield
        finally:
            kind.from_torchlib = usual


def _registry_class() -> Any:
    """Return the class of the table, a private one of torch; None where it has another name or form."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        return None
    known = isinstance(ONNXRegistry.__dict__.get("from_torchlib"), classmethod)
    return ONNXRegistry if known and hasattr(ONNXRegistry(), "functions") else None


def _copied_table(table: Any) -> Any:
    """Copy a table, so that operators registered in one export are not those of the next."""
    copied = copy.copy(table)
    copied.functions = {target: list(forms) for target, forms in table.functions.items()}
    return copied


def mended_operators() -> dict[Any, Any]:
    """Return forms of ours for operators that the exporter writes wrongly or fails on, by operator of torch.

    A remainder by a size that is not fixed (an index of padding by reflection) fails there: it expects a number.
    """
    import onnx_ir as ir
    import torch
    from onnxscript import opset18 as op

    def remainder(value: Any, divisor: Any) -> Any:
        if isinstance(divisor, int | float):
            divisor = op.Constant(value=ir.serde.serialize_tensor(ir.tensor(divisor, dtype=value.dtype)))
        else:
            divisor = op.CastLike(divisor, value)
        if value.dtype.is_integer():
            return op.Mod(value, divisor)
        rest = op.Mod(value, divisor, fmod=1)
        zero = op.Constant(value=ir.serde.serialize_tensor(ir.tensor(0.0, dtype=value.dtype)))
        other_sign = op.Xor(op.Less(rest, zero), op.Less(divisor, zero))
        wrong = op.And(other_sign, op.Not(op.Equal(rest, zero)))
        return op.Where(wrong, op.Add(rest, divisor), rest)

    return {torch.ops.aten.remainder.Scalar: remainder}
