"""int8 with stored activation scales for an ONNX source: ranges from calibration rows, layers marked with them.

ONNX Runtime itself runs the rows, with the inputs of every product and convolution as further outputs of the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...errors import NotUsableError
from .. import ort_session
from ..rewrite import DOMAIN, GraphBuilder
from . import source_weights

if TYPE_CHECKING:
    import onnx_ir as ir

SMALLEST = 64 * 64  # values of a convolution's weight, below which integers gain nothing
READERS = ("MatMul", "Gemm", "Conv")


def input_ranges(source: Path, batches: Sequence[Mapping[str, Tensor]], copy: Any) -> dict[str, float]:
    """Return the largest magnitude of each computed input of a product or convolution over calls with `batches`.

    `copy(source, path)` copies the model with its external data. Raises `NotUsableError` without any.
    """
    import onnx

    if not batches:
        raise NotUsableError(
            "no rows to calibrate with: those given judge the result, and the two may not overlap",
            hint="Give more rows with --data, of a model whose batch is not fixed",
        )
    with tempfile.TemporaryDirectory(prefix="infer-ranges-") as folder:
        path = Path(folder) / source.name
        copy(source, path)
        model = onnx.load(str(path), load_external_data=False)
        stored = {tensor.name for tensor in model.graph.initializer}
        wanted = {node.input[0] for node in model.graph.node if node.op_type in READERS} - stored
        boundary = {value.name for value in (*model.graph.input, *model.graph.output)}
        for name in sorted(wanted - boundary):
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        onnx.save(model, str(path))
        opened: Any = ort_session.open_session(path, "cpu")
        try:
            return _largest(opened, batches, wanted)
        except ort_session.runtime_errors() as error:
            raise NotUsableError(
                f"the calibration rows do not run in the model: {ort_session.clean_error_message(error)}"
            ) from error


def _largest(opened: Any, batches: Sequence[Mapping[str, Tensor]], wanted: set[str]) -> dict[str, float]:
    taken = {value.name for value in opened.get_inputs()}
    fetched = sorted(wanted - taken)
    largest: dict[str, float] = {}
    for batch in batches:
        feeds = {name: value.contiguous().numpy() for name, value in batch.items()}
        values = (
            dict(zip(fetched, ort_session.run_session(opened, fetched, feeds), strict=True))
            if fetched
            else {}
        )
        values |= {name: feeds[name] for name in wanted & taken}
        for name, value in values.items():
            if value.dtype == np.float32 and value.size and np.isfinite(value).all():
                largest[name] = max(largest.get(name, 0.0), float(np.abs(value).max()))
    return largest


def make_static(graph: ir.Graph, ranges: Mapping[str, float], names: Mapping[str, str]) -> None:
    """Give dynamic int8 layers their stored scale, where the range of their input was measured, in place.

    `names`: node name of a layer → name of its input in the source.
    """
    import onnx_ir as ir

    for node in list(graph):
        largest = ranges.get(names.get(str(node.name), ""), 0.0)
        if node.domain != DOMAIN or node.op_type != "linear_int8" or largest <= 0:
            continue
        emit = GraphBuilder(graph, node)
        operands = list(node.inputs)
        operands.insert(3, emit.constant(f"{emit.prefix}/x_scale", np.array(largest / 127, np.float32)))
        output = ir.val(f"{emit.prefix}/static")
        emit.nodes.append(
            ir.node(
                "linear_int8_static", operands, domain=DOMAIN, outputs=[output], name=f"{emit.prefix}/layer"
            )
        )
        emit.replace(output)


def mark_conv(graph: ir.Graph, node: ir.Node, ranges: Mapping[str, float]) -> bool:
    """Insert an `infer::conv2d_int8_static` node in place of a plain 2-D convolution; return true where it was one."""
    import onnx_ir as ir

    if node.domain != "" or node.op_type != "Conv" or node.inputs[0] is None or node.inputs[1] is None:
        return False
    array, largest = source_weights.weight_of(node.inputs[1]), ranges.get(str(node.inputs[0].name), 0.0)
    options = _options(node)
    bias: Any = node.inputs[2] if len(node.inputs) > 2 else None
    stored = bias is None or bias.const_value is not None
    if array is None or array.ndim != 4 or options is None or largest <= 0 or not stored:
        return False
    few = options["groups"] > 1 and array[0].size < source_weights.FEWEST_PRODUCTS
    if few or array.size < SMALLEST or not np.isfinite(array).all():
        return False
    codes, scale = source_weights.quantized(np.ascontiguousarray(array), 0)
    emit = GraphBuilder(graph, node)
    name = f"{emit.weight_name}/{emit.prefix}"
    operands: list[Any] = [
        node.inputs[0],
        emit.constant(f"{name}/codes", codes),
        emit.constant(f"{name}/step", scale.reshape(-1)),
        emit.constant(f"{name}/x_scale", np.array(largest / 127, np.float32)),
        *([] if bias is None else [bias]),
    ]
    output = ir.val(f"{emit.prefix}/int8")
    emit.nodes.append(
        ir.node(
            "conv2d_int8_static",
            operands,
            options,
            domain=DOMAIN,
            outputs=[output],
            name=f"{emit.prefix}/conv",
        )
    )
    emit.replace(output)
    return True


def _options(node: ir.Node) -> dict[str, Any] | None:
    """Return stride, padding, dilation and groups as `conv2d_int8` has them; None for uneven or automatic padding."""
    attributes = node.attributes

    def ints(name: str, default: list[int]) -> list[int]:
        return list(attributes[name].as_ints()) if name in attributes else default

    pads = ints("pads", [0, 0, 0, 0])
    automatic = attributes["auto_pad"].as_string() if "auto_pad" in attributes else "NOTSET"
    if automatic not in ("NOTSET", "VALID") or len(pads) != 4 or pads[:2] != pads[2:]:
        return None
    return {
        "stride": ints("strides", [1, 1]),
        "padding": [0, 0] if automatic == "VALID" else pads[:2],
        "dilation": ints("dilations", [1, 1]),
        "groups": attributes.get_int("group", 1),
    }
