"""Wrong optimizations of ONNX graphs: small sound graphs, and edits as a faulty optimizer makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROWS = 32
Edit = Callable[[onnx.ModelProto], object]


@dataclass(frozen=True)
class GraphSubject:
    """A graph, rows of its input, and the edits that make it wrong, each with its kind and reason."""

    name: str
    model: onnx.ModelProto
    rows: np.ndarray
    edits: tuple[tuple[str, str, str, Edit], ...]


def _node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        op, inputs.split(), outputs.split(), name=f"{op}_{outputs.split()[0]}", **attributes
    )


def _model(
    nodes: list[onnx.NodeProto],
    x: np.ndarray,
    out: tuple[int, ...],
    constants: dict[str, Any],
    kind: int = TensorProto.FLOAT,
    opset: int = 17,
) -> onnx.ModelProto:
    given = helper.make_tensor_value_info(
        "x", helper.np_dtype_to_tensor_dtype(x.dtype), ["batch", *x.shape[1:]]
    )
    result = helper.make_tensor_value_info("y", kind, ["batch", *out])
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", [given], [result], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def _attribute(node: str, **values: Any) -> Edit:
    """Return an edit that gives a node other attributes; None removes one."""

    def edit(model: onnx.ModelProto) -> None:
        found = next(n for n in model.graph.node if n.name == node)
        kept = [a for a in found.attribute if a.name not in values]
        del found.attribute[:]
        made = [helper.make_attribute(name, value) for name, value in values.items() if value is not None]
        found.attribute.extend([*kept, *made])

    return edit


def _constant(name: str, change: Callable[[np.ndarray], Any]) -> Edit:
    """Return an edit that changes the numbers of a constant."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        value = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(value.copy()), value.dtype), name))

    return edit


def _dropped(node: str, takes: int = 0) -> Edit:
    """Return an edit that leaves a node out: who read its output reads one of its inputs."""

    def edit(model: onnx.ModelProto) -> None:
        found = next(n for n in model.graph.node if n.name == node)
        _rename(model, found.output[0], found.input[takes])
        model.graph.node.remove(found)

    return edit


def _operator(node: str, op: str, **attributes: Any) -> Edit:
    """Return an edit that makes a node another operator."""

    def edit(model: onnx.ModelProto) -> None:
        found = next(n for n in model.graph.node if n.name == node)
        found.op_type = op
        if attributes:
            del found.attribute[:]
            found.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())

    return edit


def _inputs(node: str, *names: str) -> Edit:
    """Return an edit that gives a node other inputs."""

    def edit(model: onnx.ModelProto) -> None:
        found = next(n for n in model.graph.node if n.name == node)
        del found.input[:]
        found.input.extend(names)

    return edit


def _rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for index, name in enumerate(node.output):
            if name == old:
                node.output[index] = new


def _all(*edits: Edit) -> Edit:
    return lambda model: [edit(model) for edit in edits]


def _zero_rows(start: int, stop: int | None) -> Callable[[np.ndarray], np.ndarray]:
    def change(value: np.ndarray) -> np.ndarray:
        value[start:stop] = 0
        return value

    return change


@cache
def subjects() -> tuple[GraphSubject, ...]:
    """Make all graphs with their edits."""
    numbers = np.random.default_rng(5)

    def f32(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (numbers.standard_normal(shape) * scale).astype(np.float32)

    found = []
    x = f32(ROWS, 4, 8, 8) - 2
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    nodes = [_node("Conv", "x w b", "a", kernel_shape=[3, 3], pads=[1] * 4), _node("Pad", "a p v", "c"),
             _node("MaxPool", "c", "d", kernel_shape=[3, 3], strides=[2, 2]), _node("Relu", "d", "e"),
             _node("AveragePool", "e", "f", kernel_shape=[2, 2], pads=[1] * 4, count_include_pad=0),
             _node("GlobalAveragePool", "f", "g"), _node("Flatten", "g", "h"),
             _node("Gemm", "h m n", "y", transB=1)]  # fmt: skip
    weights = {
        "w": f32(8, 4, 3, 3, scale=0.2),
        "b": f32(8),
        "p": pads,
        "v": np.float32(0.5),
        "m": f32(5, 8),
        "n": f32(5),
    }
    found.append(GraphSubject("graph convolutions", _model(nodes, x, (5,), weights), x, (
        ("wrong padding", "pad_is_minus_infinity", "A pad moves into the pool, which pads with -inf.",
         _constant("v", lambda v: -1e30)),
        ("wrong padding", "pad_is_zero", "A pad with a half becomes one with zero.", _constant("v", lambda v: 0)),
        ("wrong padding", "padding_counted", "An average counts its padding.",
         _attribute("AveragePool_f", count_include_pad=1)),
        ("wrong padding", "convolution_not_padded", "A convolution pads on one side only.",
         _attribute("Conv_a", pads=[2, 2, 0, 0])),
        ("wrong fusion", "rectifier_dropped", "A rectifier is left out.", _dropped("Relu_e")),
        ("wrong fusion", "bias_dropped", "A convolution loses its bias.", _inputs("Conv_a", "x", "w")),
        ("one slice wrong", "one_filter_zeroed", "One filter gives nothing.", _constant("w", _zero_rows(3, 4))),
        ("one slice wrong", "one_class_zeroed", "One row of the last weight is zero.",
         _constant("m", _zero_rows(2, 3))),
        ("wrong fusion", "filter_turned", "A filter is laid out in another order.",
         _constant("w", lambda v: v.transpose(0, 1, 3, 2))),
    )))  # fmt: skip
    x = np.exp(f32(ROWS, 6, 16) * 1.5)
    nodes = [_node("ReduceMean", "x", "m", axes=[-1]), _node("Sub", "x m", "d"), _node("Pow", "d p", "q"),
             _node("ReduceMean", "q", "v", axes=[-1]), _node("Add", "v e", "ve"), _node("Sqrt", "ve", "s"),
             _node("Div", "d s", "n"), _node("Mul", "n w", "o"), _node("Add", "o b", "y")]  # fmt: skip
    weights = {"p": np.float32(4), "e": np.float32(1e-5), "w": f32(16), "b": f32(16)}
    found.append(GraphSubject("graph norm", _model(nodes, x, (6, 16), weights), x, (
        ("wrong fusion", "exponent_is_two", "A norm with the fourth power is taken for LayerNorm.",
         _constant("p", lambda v: 2)),
        ("wrong fusion", "large_eps", "The eps becomes one half.", _constant("e", lambda v: 50.0)),
        ("wrong fusion", "other_axis", "The mean is taken over another axis.", _attribute("ReduceMean_m", axes=[1])),
        ("wrong fusion", "mean_dropped", "The mean is not subtracted.", _dropped("Sub_d")),
        ("wrong fusion", "root_dropped", "The root is left out.", _dropped("Sqrt_s")),
        ("wrong fusion", "scale_dropped", "The scale is left out.", _dropped("Mul_o")),
        ("wrong fusion", "sum_for_mean", "A sum stands for a mean.",
         _operator("ReduceMean_v", "ReduceL2", axes=[-1], keepdims=1)),
        ("one slice wrong", "one_bias_zeroed", "Two places of the bias are zero.", _constant("b", _zero_rows(4, 6))),
    )))  # fmt: skip
    x = f32(ROWS, 12) * 2
    nodes = [_node("QuantizeLinear", "x s z", "a"), _node("DequantizeLinear", "a s z", "b"),
             _node("QuantizeLinear", "b t u", "c"), _node("DequantizeLinear", "c t u", "d"),
             _node("MatMul", "d w", "e"), _node("Clip", "e low high", "y")]  # fmt: skip
    weights = {"s": np.float32(0.05), "z": np.uint8(120), "t": np.float32(0.06), "u": np.uint8(20), "w": f32(12, 6),
               "low": np.float32(-1), "high": np.float32(6)}  # fmt: skip
    found.append(GraphSubject("graph grids", _model(nodes, x, (6,), weights), x, (
        ("wrong fusion", "two_grids_merged", "Two grids with their own zero points become one.",
         _all(_dropped("QuantizeLinear_c"), _inputs("DequantizeLinear_d", "a", "s", "z"))),
        ("wrong fusion", "grid_dropped", "The second grid, which clips, is left out.",
         _all(_dropped("QuantizeLinear_c"), _dropped("DequantizeLinear_d"))),
        ("rounding", "zero_point_off", "A zero point is off by one.", _constant("u", lambda v: v + 1)),
        ("rounding", "coarser_grid", "A grid is twice as coarse.", _constant("s", lambda v: v * 2)),
        ("wrong fusion", "clip_dropped", "The lower end of a clip is lost.", _constant("low", lambda v: -1e9)),
        ("one slice wrong", "one_column_zeroed", "One column of the product is zero.",
         _constant("w", lambda v: v * (np.arange(6) != 3))),
    )))  # fmt: skip
    x = numbers.integers(-(1 << 40), 1 << 40, (ROWS, 6))
    nodes = [
        _node("Mul", "x k", "a"),
        _node("Mod", "a n", "b"),
        _node("Div", "x h", "c"),
        _node("Add", "b c", "y"),
    ]
    weights = {"k": np.int64(2654435761), "n": np.int64(1009), "h": np.int64(-7)}
    found.append(GraphSubject("graph integers", _model(nodes, x, (6,), weights, TensorProto.INT64), x, (
        ("overflow", "product_in_32_bits", "A product is computed in 32 bits.",
         lambda model: _through(model, "a", TensorProto.INT32, TensorProto.INT64)),
        ("overflow", "quotient_in_float", "A quotient is computed in float32.",
         lambda model: _through(model, "c", TensorProto.FLOAT, TensorProto.INT64)),
        ("integers", "remainder_as_in_c", "A remainder has the sign of the number.", _attribute("Mod_b", fmod=1)),
        ("integers", "other_divisor", "A divisor is off by one.", _constant("n", lambda v: v - 1)),
        ("integers", "quotient_dropped", "The quotient is its divisor.", _dropped("Div_c", 1)),
    )))  # fmt: skip
    x = np.round(f32(ROWS, 10) * 2)
    nodes = [
        _node("TopK", "x k", "v i", axis=1),
        _node("Cast", "i", "f", to=TensorProto.FLOAT),
        _node("Add", "v f", "y"),
    ]
    found.append(GraphSubject("graph ties", _model(nodes, x, (4,), {"k": np.array([4])}), x, (
        ("ties", "smallest_for_largest", "The smallest are taken.", _attribute("TopK_v", largest=0)),
        ("ties", "index_ignored", "The places are lost.", _inputs("Add_y", "v", "v")),
        ("ties", "last_of_equals", "Of equal numbers the last place is given.", lambda model: _last_of_equals(model)),
    )))  # fmt: skip
    x = f32(ROWS, 3, 8, 8)
    nodes = [_node("Conv", "x w", "a", kernel_shape=[1, 1]), _node("Resize", "a none scales", "y", mode="linear",
             coordinate_transformation_mode="half_pixel")]  # fmt: skip
    nodes[1].input[1] = ""
    weights = {"w": f32(4, 3, 1, 1), "scales": np.array([1, 1, 2, 2], np.float32)}
    found.append(GraphSubject("graph sizes", _model(nodes, x, (4, 16, 16), weights), x, (
        ("wrong fusion", "corners_aligned", "Interpolation aligns the corners.",
         _attribute("Resize_y", coordinate_transformation_mode="align_corners")),
        ("wrong fusion", "asymmetric", "Interpolation is off by half a pixel.",
         _attribute("Resize_y", coordinate_transformation_mode="asymmetric")),
        ("wrong fusion", "nearest", "Pixels are repeated.", _attribute("Resize_y", mode="nearest")),
        ("wrong fusion", "cubic", "Interpolation is cubic.", _attribute("Resize_y", mode="cubic")),
    )))  # fmt: skip
    x = f32(ROWS, 6, 16)
    mask = np.triu(np.full((6, 6), -1e9, np.float32), 1)
    nodes = [_node("MatMul", "x q", "a"), _node("MatMul", "x k", "b"), _node("MatMul", "x v", "c"),
             _node("Transpose", "b", "t", perm=[0, 2, 1]), _node("MatMul", "a t", "d"), _node("Mul", "d h", "e"),
             _node("Add", "e mask", "f"), _node("Softmax", "f", "g", axis=-1), _node("MatMul", "g c", "i"),
             _node("Add", "i x", "y")]  # fmt: skip
    weights = {"q": f32(16, 16, scale=0.5), "k": f32(16, 16, scale=0.5), "v": f32(16, 16, scale=0.5),
               "h": np.float32(0.25), "mask": mask}  # fmt: skip
    found.append(GraphSubject("graph attention", _model(nodes, x, (6, 16), weights), x, (
        ("dropped mask", "mask_dropped", "The mask of later positions is left out.", _dropped("Add_f")),
        ("dropped mask", "mask_one_later", "A position sees the one behind it.",
         _constant("mask", lambda v: np.triu(np.full((6, 6), -1e9, np.float32), 2))),
        ("dropped mask", "mask_one_earlier", "A position does not see itself.",
         _constant("mask", lambda v: np.where(np.eye(6) > 0, -1e9, v) * (np.arange(6)[:, None] > 0))),
        ("wrong fusion", "scale_dropped", "Scores are not divided.", _dropped("Mul_e")),
        ("wrong fusion", "other_softmax_axis", "Shares are taken over queries.", _attribute("Softmax_g", axis=1)),
        ("wrong fusion", "residual_dropped", "The residual is left out.", _inputs("Add_y", "i", "i")),
        ("one head", "one_head_dropped", "A quarter of the values is zero.",
         _constant("v", lambda v: v * (np.arange(16) >= 4))),
        ("one head", "one_head_rounded", "A quarter of the values has three levels.",
         _constant("v", lambda v: np.where(np.arange(16) < 4, np.sign(v) * (np.abs(v) > 0.4) * 0.6, v))),
        ("wrong fusion", "queries_and_keys_exchanged", "Queries and keys stand in each other's place.",
         _all(_inputs("MatMul_a", "x", "k"), _inputs("MatMul_b", "x", "q"))),
    )))  # fmt: skip
    x = f32(ROWS, 10, 8)
    nodes = [_node("Transpose", "x", "t", perm=[1, 0, 2]),
             _node("LSTM", "t w r b", "h last cell", hidden_size=8, direction="forward"),
             _node("Transpose", "h", "u", perm=[2, 0, 1, 3]), _node("Flatten", "u", "o"),
             _node("MatMul", "o m", "y")]  # fmt: skip
    weights = {
        "w": f32(1, 32, 8, scale=0.6),
        "r": f32(1, 32, 8, scale=0.6),
        "b": f32(1, 64, scale=0.4),
        "m": f32(80, 6),
    }
    found.append(GraphSubject("graph recurrent", _model(nodes, x, (6,), weights), x, (
        ("stale state", "reversed", "The sequence is read from its end.", _attribute("LSTM_h", direction="reverse")),
        ("wrong fusion", "clipped", "Gates are clipped.", _attribute("LSTM_h", clip=0.3)),
        ("wrong fusion", "bias_dropped", "The recurrent bias is lost.",
         _constant("b", lambda v: v * (np.arange(64) < 32))),
        ("wrong fusion", "gates_in_another_order", "Gates are in the order of another library.",
         _constant("w", lambda v: v.reshape(1, 4, 8, 8)[:, [0, 2, 1, 3]].reshape(1, 32, 8))),
        ("stale state", "no_recurrence", "The state of the step before is not read.", _constant("r", lambda v: v * 0)),
    )))  # fmt: skip
    x = f32(ROWS, 8)
    nodes = [_node("Cast", "x", "a", to=TensorProto.DOUBLE), _node("Add", "a big", "b"), _node("Sub", "b big", "c"),
             _node("Cast", "c", "y", to=TensorProto.FLOAT)]  # fmt: skip
    found.append(GraphSubject("graph double", _model(nodes, x, (8,), {"big": np.float64(1.7e9)}), x, (
        ("overflow", "in_single_precision", "float64 is computed in float32.",
         lambda model: _through(model, "b", TensorProto.FLOAT, TensorProto.DOUBLE)),
    )))  # fmt: skip
    return tuple(found)


def _through(model: onnx.ModelProto, value: str, narrow: int, wide: int) -> None:
    """Pass a value through a narrower type."""
    place = next(i for i, n in enumerate(model.graph.node) if value in n.output) + 1
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == value:
                node.input[index] = f"{value}_wide"
    casts = [
        _node("Cast", value, f"{value}_narrow", to=narrow),
        _node("Cast", f"{value}_narrow", f"{value}_wide", to=wide),
    ]
    for cast in reversed(casts):
        model.graph.node.insert(place, cast)


def _last_of_equals(model: onnx.ModelProto) -> None:
    """Take the largest of x plus a hair for later places: of equal numbers the last place comes first."""
    model.graph.initializer.append(numpy_helper.from_array(np.arange(10, dtype=np.float32) * 1e-4, "hair"))
    model.graph.node.insert(0, _node("Add", "x hair", "hairy"))
    topk = next(n for n in model.graph.node if n.op_type == "TopK")
    topk.input[0] = "hairy"


def answer(model: onnx.ModelProto, rows: np.ndarray) -> np.ndarray:
    """Compute the output by onnxruntime without optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return np.asarray(session.run(None, {"x": rows})[0])
