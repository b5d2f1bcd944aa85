"""ONNX sources: copied into an artifact with their external data, or quantized to int8 first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NotUsableError, SourceError
from .emit import Emit
from .export import DOMAIN, IR_VERSION_CAP, save
from .int8 import Rewritten, rewrite
from .linear import Form
from .operands import Target

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

OLDEST_OPSET = 11  # of the operators that int8 layers are written with
SMALLEST_WEIGHT = 16  # rows and columns below which int8 gains nothing


def copy(source: Path, path: Path) -> None:
    """Copy a model byte by byte, its external data files beside it under the names it uses.

    Raises `SourceError` when a name points outside the model's folder or the file is absent.
    """
    import onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    model = onnx.load(str(source), load_external_data=False)
    for name in sorted(_external(model)):
        origin = (source.parent / name).resolve()
        if not origin.is_relative_to(source.parent.resolve()):
            raise SourceError(f"external data {name!r} lies outside the model's folder", where=str(source))
        if not origin.is_file():
            raise SourceError(f"external data {name!r} is missing", where=str(source))
        place = path.parent / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin, place)
    shutil.copyfile(source, path)


def opset(source: Path) -> int:
    """The model's operator set."""
    import onnx

    model = onnx.load(str(source), load_external_data=False)
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def quantize(source: Path, path: Path, target: Target, form: Form = "token") -> Rewritten:
    """Write the model with int8 layers: every MatMul and plain Gemm whose weight is stored."""
    import onnx_ir as ir

    model = ir.load(str(source))
    if model.opset_imports.get("", 0) < OLDEST_OPSET:
        raise NotUsableError(f"int8 needs an ONNX source of opset {OLDEST_OPSET} or above", where=str(source))
    for node in list(model.graph):
        weight = _weight(node)
        if weight is not None:
            _mark(model.graph, node, weight)
    model.opset_imports[DOMAIN] = 1
    done = rewrite(model, target, form)
    model.ir_version = min(model.ir_version, max(IR_VERSION_CAP, 3))
    save(model, path)
    return done


def is_float32(model: ir.Model) -> bool:
    """Whether no stored float tensor is of lower precision yet."""
    import onnx_ir as ir

    low = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return not any(value.dtype in low for value in model.graph.initializers.values())


def _external(model: onnx.ModelProto) -> set[str]:
    from onnx.external_data_helper import uses_external_data

    tensors = list(model.graph.initializer)
    tensors += [a.t for node in model.graph.node for a in node.attribute if a.HasField("t")]
    return {
        entry.value
        for tensor in tensors
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _weight(node: ir.Node) -> np.ndarray | None:
    """The weight [K, N] of a product with a stored float32 matrix, else None."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    value = node.inputs[1]
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    array = value.const_value.numpy()
    if array.ndim != 2 or array.dtype != np.float32 or min(array.shape) < SMALLEST_WEIGHT:
        return None
    if node.op_type == "MatMul":
        return array
    plain = {"alpha": 1.0, "beta": 1.0}
    if any(node.attributes.get_float(key, 1.0) != want for key, want in plain.items()):
        return None
    if node.attributes.get_int("transA", 0):
        return None
    return array.T if node.attributes.get_int("transB", 0) else array


def _mark(graph: ir.Graph, node: ir.Node, weight: np.ndarray) -> None:
    """Put an `infer::linear_int8` in the place of a product; per output channel, absmax / 127."""
    import onnx_ir as ir

    rows = np.ascontiguousarray(weight.T)
    scale = np.maximum(np.abs(rows).max(axis=1), 1e-30).astype(np.float32) / np.float32(127)
    codes = np.rint(rows / scale[:, None]).clip(-127, 127).astype(np.int8)
    emit = Emit(graph, node)
    name = emit.weight_name
    bias: Any = node.inputs[2] if len(node.inputs) > 2 else None
    is_vector = bias is None or (bias.const_value is not None and bias.const_value.numpy().ndim == 1)
    layer = [node.inputs[0], emit.constant(f"{name}/codes", codes), emit.constant(f"{name}/step", scale)]
    output = ir.val(f"{emit.prefix}/int8")
    if is_vector and bias is not None and bias.const_value.numpy().size == len(codes):
        layer.append(bias)
        bias = None
    emit.nodes.append(
        ir.node("linear_int8", layer, domain=DOMAIN, outputs=[output], name=f"{emit.prefix}/linear")
    )
    emit.replace(output if bias is None else emit("Add", output, bias))
