"""int8 with stored scales for ONNX sources: products and convolutions, calibrated on rows that do not judge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
onnxruntime = pytest.importorskip("onnxruntime")

from backends.ort.layers import rewriter  # noqa: E402
from infer import Plan, Predictor  # noqa: E402
from infer.errors import NotUsableError  # noqa: E402
from infer.onnx.source import onnx_source, static_int8  # noqa: E402
from infer.run import stages  # noqa: E402
from tests.support.onnx_models import ORT_TARGETS  # noqa: E402

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
agraph (float[batch, 3, 12, 12] x) => (float[batch, 10] y)
<float[32, 3, 3, 3] stem, float[32, 32, 3, 3] conv, float[32] bias, float[32, 64] w, float[64, 10] head, float[10] c> {
    a = Conv <pads = [1, 1, 1, 1]> (x, stem)
    b = Relu(a)
    d = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (b, conv, bias)
    e = Relu(d)
    f = GlobalAveragePool(e)
    g = Flatten(f)
    h = MatMul(g, w)
    i = Relu(h)
    y = Gemm(i, head, c)
}"""
SHAPES = {
    "stem": (32, 3, 3, 3),
    "conv": (32, 32, 3, 3),
    "bias": (32,),
    "w": (32, 64),
    "head": (64, 10),
    "c": (10,),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    del model.graph.initializer[:]
    for name, shape in SHAPES.items():
        fan = max(int(np.prod(shape[1:])) if len(shape) > 2 else shape[0], 1)
        value = (rng.standard_normal(shape) * (2 / fan) ** 0.5).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    path = tmp_path_factory.mktemp("source") / "model.onnx"
    onnx.save(model, str(path))
    return path


def rows(count: int, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))}


def run(path: Path, x: Tensor) -> np.ndarray:
    return onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})[0]


def test_calibrated_ranges_are_those_of_each_layers_inputs(source: Path) -> None:
    given = rows(11)
    ranges = static_int8.input_ranges(source, [given], onnx_source.copy)
    assert set(ranges) == {"x", "b", "g", "i"}
    assert ranges["x"] == pytest.approx(float(given["x"].abs().max()))
    model = onnx.load(str(source))
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("i"))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    assert ranges["i"] == pytest.approx(
        float(np.abs(session.run(["i"], {"x": given["x"].numpy()})[0]).max()), rel=1e-5
    )


@pytest.mark.parametrize("signs", ORT_TARGETS)
def test_products_and_convolutions_become_integers_of_small_error(
    source: Path, tmp_path: Path, signs: str
) -> None:
    ranges = onnx_source.input_ranges(source, [rows(32)])
    done, coverage = onnx_source.quantize(source, tmp_path / "int8.onnx", rewriter(signs), ranges)
    assert done.forms["static int8"] == 1  # the head is too small
    assert done.forms["convolution in float, int8 weights"] + done.forms["static int8 convolution"] == 1
    assert coverage.formats["int8"] >= 32 * 32 * 9 + 32 * 64
    x = rows(16, seed=5)["x"]
    expected, got = run(source, x), run(tmp_path / "int8.onnx", x)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.05
    operators = {node.op_type for node in onnx.load(str(tmp_path / "int8.onnx")).graph.node}
    assert {"MatMulInteger", "QuantizeLinear"} <= operators


def test_calibration_without_separate_rows_is_refused(source: Path) -> None:
    with pytest.raises(NotUsableError, match="no rows to calibrate with.*Give more rows with --data"):
        static_int8.input_ranges(source, [], onnx_source.copy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}),
        ('auto_pad = "VALID"', {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}),
        (
            "pads = [1, 2, 1, 2], group = 4",
            {"stride": [1, 1], "padding": [1, 2], "dilation": [1, 1], "groups": 4},
        ),
        ("pads = [0, 0, 1, 1]", None),
        ('auto_pad = "SAME_UPPER"', None),
    ],
)
def test_only_even_padding_becomes_an_integer_convolution(text: str, expected: object) -> None:
    import onnx_ir as ir

    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 8, 9, 9] x, float[8, 8, 3, 3] w) => (float[N, 8, A, B] y)'
        f" {{ y = Conv <{text}> (x, w) }}" if text else
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 8, 9, 9] x, float[8, 8, 3, 3] w) => (float[N, 8, A, B] y)'
        " { y = Conv (x, w) }"
    )  # fmt: skip
    assert static_int8._options(ir.from_proto(model).graph[0]) == expected


def test_static_int8_of_an_onnx_source_is_judged_and_published(source: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", rows(64)["x"].numpy())
    plan = Plan(
        source=str(source), backend="ort", quant="int8:static", data=str(tmp_path / "rows.npy"), batches=(),
        allow_slower=True,
    )  # fmt: skip
    made = stages.optimize(plan, tmp_path / "out.infer")
    x = rows(5, seed=9)["x"]
    with Predictor.load(made.path) as predictor:
        got = predictor.predict({"x": x.numpy()})["y"]
    expected = run(source, x)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.05
    with pytest.raises(NotUsableError, match=r"no layer of this model can be nf4 \(.*not Conv2d"):
        stages.optimize(plan.with_(quant="nf4"), tmp_path / "nf4.infer")
