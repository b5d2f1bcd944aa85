"""ONNX files are judged by their operators as written, and timed against the runtime that their user has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from infer import Plan, Predictor, optimize  # noqa: E402
from infer.errors import GateError, NotUsableError, SourceError  # noqa: E402

RNG = np.random.default_rng(0)
Array = np.ndarray


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def node(op: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), [output], **attributes)


PADDED = [
    node("Conv", "x w", "a"),
    node("Pad", "a p", "b"),
    node("MaxPool", "b", "z", kernel_shape=[3, 3], strides=[2, 2]),
]
NORM = [
    node("ReduceMean", "x", "m", axes=[-1]),
    node("Sub", "x m", "d"),
    node("Pow", "d p", "q"),
    node("ReduceMean", "q", "v", axes=[-1]),
    node("Add", "v e", "ve"),
    node("Sqrt", "ve", "sd"),
    node("Div", "d sd", "n"),
    node("Mul", "n w", "o"),
    node("Add", "o c", "z"),
]
GRIDS = [
    node("QuantizeLinear", "x s z1", "a"),
    node("DequantizeLinear", "a s z1", "b"),
    node("QuantizeLinear", "b s z2", "c"),
    node("DequantizeLinear", "c s z2", "z"),
]
LARGEST = [
    node("GlobalMaxPool", "x", "a"),
    node("QuantizeLinear", "a s z1", "b"),
    node("DequantizeLinear", "b s z1", "z"),
]
# OpenVINO 2026.4.1 ends its process (SIGSEGV) while it compiles this one.
DOUBLED = [
    node("Concat", "x x", "t", axis=1),
    node("QuantizeLinear", "t s z1", "a"),
    node("DequantizeLinear", "a s z1", "b"),
    node("QuantizeLinear", "b s z2", "c"),
    node("DequantizeLinear", "c s z2", "d"),
    node("Softmax", "d", "z", axis=1),
]
WIDE = [node("Pad", "x p", "b"), node("MaxPool", "b", "z", kernel_shape=[2, 2], strides=[2, 2])]
# name → nodes, input, constants, sizes of the output after the batch
GRAPHS: dict[str, tuple[list[Any], Array, dict[str, Array], list[int]]] = {
    "zeros padded before a maximum": (
        PADDED,
        floats(16, 4, 6, 6) - 3,
        {"w": np.abs(floats(8, 4, 1, 1)) * 0.1, "p": np.array([0, 0, 1, 1, 0, 0, 1, 1])},
        [8, 3, 3],
    ),
    "a norm of fourth powers": (
        NORM,
        np.exp(floats(16, 8) * 2),
        {"p": np.float32(4), "e": np.float32(1e-5), "w": floats(8), "c": floats(8)},
        [8],
    ),
    "two grids": (
        GRIDS,
        floats(16, 8),
        {"s": np.float32(0.05), "z1": np.uint8(120), "z2": np.uint8(20)},
        [8],
    ),
    "two grids of a value beside itself": (
        DOUBLED,
        floats(16, 6, 8),
        {"s": np.float32(0.1), "z1": np.uint8(120), "z2": np.uint8(20)},
        [12, 8],
    ),
    "the largest of a map, rounded": (
        LARGEST,
        floats(16, 4, 6, 6),
        {"s": np.float32(0.05), "z1": np.uint8(128)},
        [4, 1, 1],
    ),
    "pads wider than the window": (
        WIDE,
        floats(16, 4, 6, 6) - 3,
        {"p": np.array([0, 0, 2, 2, 0, 0, 2, 2])},
        [4, 5, 5],
    ),
}


def write(
    folder: Path, nodes: list[Any], x: Array, constants: dict[str, Array], output: list[int]
) -> tuple[Path, Path]:
    """Write the model and its rows; return their paths."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *x.shape[1:]])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", *output])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opset = 19 if any("Quantize" in made.op_type for made in nodes) else 17  # what onnx's evaluator knows
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "rows.npz", x=x)
    return folder / "model.onnx", folder / "rows.npz"


def as_written(path: Path, x: Array) -> Array:
    """Compute the file's output by onnx's own evaluator, which no runtime here shares."""
    return ReferenceEvaluator(str(path)).run(None, {"x": x})[0]  # type: ignore[no-any-return]


def plan(path: Path, rows: Path, backend: str, **options: Any) -> Plan:
    return Plan(source=str(path), data=str(rows), backend=backend, allow_slower=True, batches=(1,), **options)


@pytest.mark.openvino
@pytest.mark.parametrize("backend", ["ort", "openvino"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_published_onnx_file_gives_the_numbers_it_says(name: str, backend: str, tmp_path: Path) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    nodes, x, constants, output = GRAPHS[name]
    path, rows = write(tmp_path, nodes, x, constants, output)
    try:
        optimize(plan(path, rows, backend), tmp_path / "m.infer")
    except (GateError, NotUsableError):
        assert (
            backend == "openvino"
        )  # its own fusions change the answer or crash, and it has no milder setting
        return
    with Predictor.load(tmp_path / "m.infer") as predictor:
        got = predictor.predict({"x": x})["z"]
    np.testing.assert_allclose(got, as_written(path, x), rtol=1e-4, atol=1e-5)


def test_the_verdict_says_which_optimization_level_serves(tmp_path: Path) -> None:
    path, rows = write(tmp_path, *GRAPHS["zeros padded before a maximum"])
    outcome = optimize(plan(path, rows, "ort"), tmp_path / "m.infer")
    assert "ort runs with optimization" in " ".join(outcome.manifest.verdict)
    assert outcome.manifest.plan.backend_options["optimization"] in ("extended", "basic", "off")


def test_a_level_that_the_user_names_is_not_changed(tmp_path: Path) -> None:
    path, rows = write(tmp_path, *GRAPHS["zeros padded before a maximum"])
    with pytest.raises(GateError, match="not faithful enough"):
        optimize(plan(path, rows, "ort", backend_options={"optimization": "all"}), tmp_path / "m.infer")


@pytest.mark.openvino
def test_the_rival_of_an_onnx_file_is_named_after_what_ran(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    path, rows = write(tmp_path, [node("MatMul", "x w", "z")], floats(16, 64), {"w": floats(64, 64)}, [64])
    for backend in ("ort", "openvino"):
        outcome = optimize(plan(path, rows, backend), tmp_path / f"{backend}.infer")
        assert outcome.report.baseline == "ONNX Runtime", outcome.report


def test_a_file_of_nan_weights_is_refused_as_such(tmp_path: Path) -> None:
    weight = np.full((8, 8), np.nan, np.float32)
    path, rows = write(tmp_path, [node("MatMul", "x w", "z")], floats(16, 8), {"w": weight}, [8])
    with pytest.raises(SourceError, match="every value of output 'z' is NaN"):
        optimize(plan(path, rows, "ort"), tmp_path / "m.infer")


def test_a_file_that_draws_random_numbers_is_refused_as_such(tmp_path: Path) -> None:
    nodes = [node("RandomNormalLike", "x", "r"), node("Add", "x r", "z")]
    path, rows = write(tmp_path, nodes, floats(16, 8), {}, [8])
    with pytest.raises(SourceError, match="two runs of the original on the same rows differ"):
        optimize(plan(path, rows, "ort"), tmp_path / "m.infer")


@pytest.mark.parametrize("data", [None, "ours"])
def test_a_file_without_data_is_checked_and_says_on_what(data: str | None, tmp_path: Path) -> None:
    table = [node("Gather", "t x", "g", axis=0), node("Mul", "g rate", "z")]
    ends = [
        helper.make_tensor_value_info("rate", TensorProto.FLOAT, []),  # a scalar, and the first input
        helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 3]),
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 3, 4]),
    ]
    graph = helper.make_graph(table, "g", ends[:2], ends[2:], [numpy_helper.from_array(floats(37, 4), "t")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    source = str(tmp_path / "model.onnx")
    made = optimize(
        Plan(source=source, data=data, backend="ort", batches=(1,), allow_slower=True), tmp_path / "m.infer"
    )
    with Predictor.load(made.path) as predictor:
        assert "checked on inputs of ours: give --data for a claim about yours" in predictor.manifest.verdict
        assert predictor.manifest.plan.data == "ours"
        assert predictor.manifest.samples_from == "numbers of ours"
