"""ONNX files whose plan needs a torch program: imported, quantized, judged by ONNX Runtime on the file itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from infer import Plan, Predictor, device, optimize  # noqa: E402
from infer.errors import GateError, NotUsableError  # noqa: E402
from infer.load import onnx_program  # noqa: E402
from infer.onnx.source import source_weights  # noqa: E402
from infer.reporter import Reporter  # noqa: E402
from infer.run import onnx_form, resolve_plan, stages  # noqa: E402
from infer.run.publish import Outcome  # noqa: E402

BODY = """
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({input}, w, b)
    r = Relu (a)
    s = Shape (r)
    n = Gather <axis = 0> (s, zero)
    one = Unsqueeze <axes = [0]> (n)
    shape = Concat <axis = 0> (one, rest)
    f = Reshape (r, shape)
    h = Gemm <transB = 1> (f, v, c)
    t = {last} (h)
    y = MatMul (t, u)
"""


def write(folder: Path, *, last: str = "Tanh", name: str = "x") -> Path:
    """Write a small convolutional network of opset 11 with rows of data beside it."""
    rng = np.random.default_rng(0)
    signature = "(float[batch, 4, 4, 4] x) => (float[batch, 64] y)"
    body = BODY.format(input="x", last=last)
    model = onnx.parser.parse_model(f'<ir_version: 6, opset_import: ["" : 11]> g {signature} {{ {body} }}')
    shapes = {"w": (64, 4, 3, 3), "b": (64,), "v": (128, 1024), "c": (128,), "u": (128, 64)}
    weights = {
        key: (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        for key, shape in shapes.items()
    }
    weights |= {"zero": np.array(0), "rest": np.array([1024])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, key) for key, value in weights.items())
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    np.savez(folder / "data.npz", **{name: rng.standard_normal((48, 4, 4, 4)).astype(np.float32)})
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def optimized(source: Path, **options: Any) -> Outcome:
    plan = Plan(source=str(source), data=str(source.parent / "data.npz"), batches=(), allow_slower=True)
    return optimize(plan.with_(**options), source.parent / "model.infer")


def error(source: Path, made: Outcome) -> float:
    """Return the relative error of an artifact against ONNX Runtime on the file."""
    data = dict(np.load(source.parent / "data.npz"))
    (want,) = onnxruntime.InferenceSession(str(source)).run(None, data)
    with Predictor.load(made.path) as predictor:
        got = predictor.predict(data)["y"]
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def said(made: Outcome, name: str) -> list[Any]:
    return [finding for finding in made.manifest.findings if finding.what == name]


@pytest.mark.parametrize(
    ("backend", "quant", "least", "most"),
    [
        ("eager", "none", 0, 1e-5),
        ("eager", "nf4", 1e-3, 0.2),
        ("eager", "int8", 1e-5, 0.05),
        ("ort", "nf4", 1e-3, 0.2),
    ],
)
def test_formats_of_torch_take_an_onnx_file_of_opset_11(
    tmp_path: Path, backend: str, quant: str, least: float, most: float
) -> None:
    source = write(tmp_path)
    made = optimized(source, backend=backend, quant=quant)
    assert least <= error(source, made) <= most
    assert [finding.value for finding in said(made, "form")] == ["torch program"]
    kinds = {layer.name: layer.format for layer in made.manifest.layers}
    assert kinds == {} if quant == "none" else kinds["v"] == quant, kinds


def test_inductor_compiles_an_onnx_file(tmp_path: Path) -> None:
    source = write(tmp_path, name="serving/x:0")
    made = optimized(source, backend="inductor", quant="none")
    assert error(source, made) <= 1e-5


def test_a_squeeze_that_takes_the_batch_of_one_row_is_judged(tmp_path: Path) -> None:
    source = write(tmp_path)
    model = onnx.load(str(source))
    model.graph.node[-1].output[0] = "wide"
    last = onnx.parser.parse_graph(
        "g (float[batch, 64] wide) => (float[batch] y) { mean = ReduceMean <axes = [1]> (wide) y = Squeeze (mean) }"
    )
    model.graph.node.extend(last.node)
    model.graph.output[0].CopyFrom(last.output[0])
    onnx.save(model, str(source))
    made = optimized(source, backend="eager", quant="none")
    assert error(source, made) <= 1e-5


def test_a_file_that_a_backend_takes_stays_onnx(tmp_path: Path) -> None:
    made = optimized(write(tmp_path), backend="ort", quant="none")
    assert said(made, "form") == []


def test_what_is_not_imported_is_in_the_refusal_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(onnx_program.operators.OPERATORS, ("", "Tanh"))
    with pytest.raises(NotUsableError, match=r"not imported: operator Tanh \(opset 11\) at node 't'"):
        optimized(write(tmp_path), backend="eager", quant="none")


def test_int8_stays_with_the_file_where_it_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(onnx_program.operators.OPERATORS, ("", "Tanh"))
    monkeypatch.setattr(onnx_form, "ENOUGH", 0.0)
    made = optimized(write(tmp_path), backend="ort", quant="int8")
    (found,) = said(made, "form")
    assert found.value == "ONNX"
    assert "operator Tanh (opset 11)" in found.why


def test_int8_stays_with_the_file_where_the_program_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(node: Any, x: Any) -> None:
        raise RuntimeError("planted")

    broken = [onnx_program.operators.Operator(fail, 1)]
    monkeypatch.setitem(onnx_program.operators.OPERATORS, ("", "Tanh"), broken)
    monkeypatch.setattr(onnx_form, "ENOUGH", 0.0)
    (found,) = [
        f for f in said(optimized(write(tmp_path), backend="ort", quant="int8"), "form") if f.value == "ONNX"
    ]
    assert "planted" in found.why


def test_a_wrong_import_is_refused_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = onnx_program.operators.Operator(lambda node, x: x.tanh() * 1.01, 1)
    monkeypatch.setitem(onnx_program.operators.OPERATORS, ("", "Tanh"), [wrong])
    with pytest.raises(GateError):
        optimized(write(tmp_path), backend="eager", quant="none")


@pytest.mark.openvino
@pytest.mark.parametrize("backend", ["ort", "openvino"])
@pytest.mark.parametrize(
    ("quant", "least", "most", "share"),
    [("int8", 1e-4, 0.05, 0.35), ("int8:weight", 1e-4, 0.05, 0.35), ("fp16", 1e-6, 1e-3, 0.6)],
)
def test_int8_and_fp16_keep_the_graph_of_the_file(
    tmp_path: Path, backend: str, quant: str, least: float, most: float, share: float
) -> None:
    source = write(tmp_path)
    made = optimized(source, backend=backend, quant=quant)
    assert least <= error(source, made) <= most
    (found,) = said(made, "form")
    assert (found.value, "decoded when it is opened" in found.why) == ("ONNX", True)
    held = sum(path.stat().st_size for path in (made.path / "compiled").iterdir())
    assert held < share * source.stat().st_size + 30_000  # what OpenVINO writes of a graph


@pytest.mark.parametrize("vnni", [False, True])
def test_the_program_comes_first_where_integers_can_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vnni: bool
) -> None:
    monkeypatch.setattr(device, "has_vnni", lambda: vnni)
    source = write(tmp_path)
    run = resolve_plan.resolve(Plan(source=str(source), data=str(tmp_path / "data.npz"), quant="int8"))
    loaded, run = stages.load(run, form="file")
    loaded = replace(loaded, operator_seconds={"Conv": 8.0, "Gemm": 1.0, "Tanh": 1.0})
    first = "program" if vnni else "file"
    assert next(iter(onnx_form.forms(run.plan, loaded))) == first
    loaded = replace(loaded, operator_seconds={"Conv": 1.0, "Gemm": 8.0, "Tanh": 1.0})
    assert next(iter(onnx_form.forms(run.plan, loaded))) == "program"
    assert next(iter(onnx_form.forms(run.plan.with_(backend="ort"), loaded))) == "file"
    assert next(iter(onnx_form.forms(run.plan.with_(quant="fp16"), loaded))) == "file"
    assert list(onnx_form.forms(run.plan.with_(bits=6.0), loaded)) == ["program"]
    assert list(onnx_form.forms(run.plan.with_(quant="int8:static", backend="ort"), loaded)) == ["program"]


def test_a_program_that_is_refused_is_followed_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = onnx_program.operators.Operator(lambda node, x: x.tanh() * 1.5, 1)
    monkeypatch.setitem(onnx_program.operators.OPERATORS, ("", "Tanh"), [wrong])
    monkeypatch.setattr(onnx_form, "ENOUGH", 0.0)
    source = write(tmp_path)
    made = optimized(source, backend="ort", quant="int8")
    assert error(source, made) < 0.05
    assert [found.value for found in said(made, "form")] == ["ONNX"]


@pytest.fixture
def coarse_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round the weights of a file to tenths."""

    def coarse(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        share, scale = np.ones([1] * array.ndim, np.uint8), np.full([1] * array.ndim, 0.1, np.float32)
        return np.rint(array / 0.1).astype(np.int8), share, scale

    monkeypatch.setattr(source_weights, "blocks", coarse)
    monkeypatch.setattr(source_weights, "quantized", lambda *given: coarse(*given)[::2])


@pytest.mark.openvino
@pytest.mark.usefixtures("coarse_codes")
def test_weights_that_lose_too_much_get_the_bits_that_suffice_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second backend begins with what the first one needed: coarser codes of the same file lose as much there."""
    pytest.importorskip("openvino")
    monkeypatch.setattr(onnx_form, "ENOUGH", 2.0)  # the file first
    lowered: list[str] = []

    class Steps(Reporter):
        def step(self, name: str, detail: str = "") -> None:
            lowered.extend([detail] * (name == "lower"))

    source = write(tmp_path)
    plan = Plan(
        source=str(source), data=str(tmp_path / "data.npz"), quant="int8", batches=(), allow_slower=True
    )
    made = optimize(plan, tmp_path / "model.infer", reporter=Steps())
    first = [label for label in lowered if label.startswith("ort")]
    assert first == ["ort", "ort float", "ort mixed", "ort finer", "ort fp16"][: len(first)]
    assert [label for label in lowered if label.startswith("openvino")] == [
        f"openvino {first[-1].split()[-1]}"
    ]
    assert len(first) > 2
    assert error(source, made) < 0.05


@pytest.mark.usefixtures("coarse_codes")
def test_a_file_whose_weights_lose_too_much_is_followed_by_the_program(tmp_path: Path) -> None:
    source = write(tmp_path)
    made = optimized(source, backend="ort", quant="int8", backend_options={"weights": "int8"})
    assert error(source, made) < 0.05
    assert [found.value for found in said(made, "form")] == ["torch program"]
