"""ONNX sources: copied byte by byte, or quantized to int8 by our own forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
onnxruntime = pytest.importorskip("onnxruntime")

from backends import ort  # noqa: E402
from backends.ort.layers import rewriter  # noqa: E402
from infer.errors import NotUsableError, SourceError  # noqa: E402
from infer.graph.program import OnnxGraph  # noqa: E402
from infer.onnx import ort_session  # noqa: E402
from infer.onnx.source import onnx_source, source_weights, weight_effects  # noqa: E402
from infer.plan import Plan  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
agraph (float[batch, 64] x) => (float[batch, 32] y, float[batch, 8] z)
<float[64, 96] w, float[32, 96] v, float[32] c, float[96, 8] small> {
    h = MatMul(x, w)
    r = Relu(h)
    y = Gemm <transB = 1> (r, v, c)
    z = MatMul(r, small)
}"""


def write(path: Path, *, external: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 96), "v": (32, 96), "c": (32,), "small": (96, 8)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    model = onnx.parser.parse_model(TEXT)
    del model.graph.initializer[:]
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in tensors.items()
    )
    onnx.save(model, str(path), save_as_external_data=external, location="tensors.bin", size_threshold=0)
    return tensors


def run(path: Path, x: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(str(path)).run(None, {"x": x})


def test_a_copy_takes_its_external_data_along(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx", external=True)
    onnx_source.copy(tmp_path / "model.onnx", tmp_path / "there" / "compiled.onnx")
    x = np.ones((2, 64), np.float32)
    for mine, original in zip(
        run(tmp_path / "there" / "compiled.onnx", x), run(tmp_path / "model.onnx", x), strict=True
    ):
        np.testing.assert_array_equal(mine, original)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "absent.bin"])
def test_external_data_outside_the_folder_is_never_read(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(b"0" * 1000)
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "model.onnx", external=True)
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(SourceError, match="the data of '.*' (points outside|is missing)"):
        onnx_source.copy(folder / "model.onnx", tmp_path / "out" / "model.onnx")


def test_int8_covers_matmul_and_gemm_but_not_small_ones(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx")
    done, coverage = onnx_source.quantize(
        tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", rewriter("ort-u8u8")
    )
    assert (coverage.quantized_values, coverage.total_values) == (
        64 * 96 + 32 * 96,
        64 * 96 + 32 * 96 + 32 + 768,
    )
    assert done.forms == {"dynamic int8, a scale per token": 2}
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    for got, want in zip(
        run(tmp_path / "int8" / "model.onnx", x), run(tmp_path / "model.onnx", x), strict=True
    ):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02


def test_an_int8_onnx_file_is_smaller(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx")
    onnx_source.quantize(tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", rewriter("ort-u8u8"))
    written = sum(file.stat().st_size for file in (tmp_path / "int8").iterdir())
    assert written < (tmp_path / "model.onnx").stat().st_size / 2


HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
# Name → graph, shapes of its weights, share of the values that become int8 in per cent, form of its layers.
FORMS: dict[str, tuple[str, dict[str, tuple[int, ...]], float, str]] = {
    "conv": (
        "g (float[b, 16, 9, 9] x) => (float[b, 32, h, w] y) <float[32, 16, 3, 3] w, float[32] c>"
        "{ y = Conv <pads = [1, 1, 1, 1]> (x, w, c) }",
        {"w": (32, 16, 3, 3), "c": (32,)}, 99.3, "int8 weights"),
    "conv1d_grouped": (
        "g (float[b, 64, 9] x) => (float[b, 64, h] y) <float[64, 32, 3] w> { y = Conv <group = 2> (x, w) }",
        {"w": (64, 32, 3)}, 100, "int8 weights"),
    "conv_transpose": (
        "g (float[b, 32, 5, 5] x) => (float[b, 16, h, w] y) <float[32, 16, 3, 3] w>"
        "{ y = ConvTranspose <strides = [2, 2]> (x, w) }",
        {"w": (32, 16, 3, 3)}, 100, "int8 weights"),
    "lstm": (
        "g (float[t, b, 32] x) => (float[t, d, b, 32] y) <float[1, 128, 32] w, float[1, 128, 32] r, float[1, 256] c>"
        "{ y = LSTM <hidden_size = 32> (x, w, r, c) }",
        {"w": (1, 128, 32), "r": (1, 128, 32), "c": (1, 256)}, 97, "int8 weights"),
    "gru_both_ways": (
        'g (float[t, b, 32] x) => (float[t, d, b, 32] y) <float[2, 96, 32] w, float[2, 96, 32] r>'
        '{ y = GRU <hidden_size = 32, direction = "bidirectional"> (x, w, r) }',
        {"w": (2, 96, 32), "r": (2, 96, 32)}, 100, "int8 weights"),
    "gemm_alpha_beta": (
        "g (float[b, 64] x) => (float[b, 96] y) <float[64, 96] w, float[96] c>"
        "{ y = Gemm <alpha = 0.5, beta = 3.0> (x, w, c) }",
        {"w": (64, 96), "c": (96,)}, 98.4, "dynamic int8, a scale per token"),
    "gemm_turned": (
        "g (float[64, b] x) => (float[b, 96] y) <float[96, 64] w, float[1, 96] c>"
        "{ y = Gemm <transA = 1, transB = 1, beta = 2.0> (x, w, c) }",
        {"w": (96, 64), "c": (1, 96)}, 98.4, "dynamic int8, a scale per token"),
    "behind_nodes": (
        "g (float[b, 64] x) => (float[b, 96] y) <float[96, 64] w>"
        "{ v = Identity(w)\n t = Transpose <perm = [1, 0]> (v)\n y = MatMul(x, t) }",
        {"w": (96, 64)}, 100, "dynamic int8, a scale per token"),
    "shared_and_scaled": (
        "g (float[b, 64] x) => (float[b, 64] y) <float[64, 64] w>"
        "{ a = MatMul(x, w)\n r = Relu(a)\n y = Gemm <alpha = 0.25, transB = 1> (r, w) }",
        {"w": (64, 64)}, 100, "dynamic int8, a scale per token"),
    "tied_embedding": (
        "g (int64[b, 5] x) => (float[b, 5, 100] y) <float[100, 64] w>"
        "{ e = Gather(w, x)\n t = Transpose <perm = [1, 0]> (w)\n y = MatMul(e, t) }",
        {"w": (100, 64)}, 100, "int8 embedding"),
    "weight_on_the_left": (
        "g (float[64, b] x) => (float[96, b] y) <float[96, 64] w> { y = MatMul(w, x) }",
        {"w": (96, 64)}, 100, "int8 weights"),
    "stacked": (
        "g (float[4, b, 32] x) => (float[4, b, 48] y) <float[4, 32, 48] w> { y = MatMul(x, w) }",
        {"w": (4, 32, 48)}, 100, "int8 weights"),
    "handed_through_a_loop": (
        "g (float[b, 64] x) => (float[b, 64] y) <float[64, 64] w, int64 steps = {3}, bool go = {1}>"
        "{ y, last = Loop <body = step (int64 i, bool on, float[b, 64] h, float[64, 64] v)"
        "=> (bool more, float[b, 64] n, float[64, 64] u)"
        "{ more = Identity(on)\n m = MatMul(h, v)\n n = Tanh(m)\n u = Identity(v) }> (steps, go, x, w) }",
        {"w": (64, 64)}, 100, "int8 weights"),
    "handed_through_a_scan": (
        "g (float[5, 64] x) => (float[5, 64] y) <float[64, 64] w>"
        "{ last, y = Scan <num_scan_inputs = 1, body = step (float[64, 64] v, float[64] h)"
        "=> (float[64, 64] u, float[64] n) { m = MatMul(h, v)\n n = Tanh(m)\n u = Identity(v) }> (w, x) }",
        {"w": (64, 64)}, 100, "int8 weights"),
}  # fmt: skip


def written_form(name: str, path: Path) -> tuple[float, np.ndarray]:
    """Write a model of `FORMS` with random weights; return the percentage to quantize, and an input."""
    text, shapes, share, _ = FORMS[name]
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(HEAD + text)
    for tensor in [one for one in model.graph.initializer if one.name in shapes]:
        model.graph.initializer.remove(tensor)
    for key, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, key))
    onnx.save(model, str(path))
    spec = model.graph.input[0].type.tensor_type
    sizes = [d.dim_value or 3 for d in spec.shape.dim]
    x = rng.integers(0, 100, sizes) if spec.elem_type == 7 else rng.standard_normal(sizes).astype(np.float32)
    return share, x


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_every_operator_become_int8_and_are_counted(tmp_path: Path, name: str) -> None:
    form = FORMS[name][3]
    share, x = written_form(name, tmp_path / "model.onnx")
    done, coverage = onnx_source.quantize(
        tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", rewriter("ort-u8u8")
    )
    assert form in done.forms
    assert 100 * coverage.share == pytest.approx(share, abs=0.1)
    [got], [want] = run(tmp_path / "int8" / "model.onnx", x), run(tmp_path / "model.onnx", x)
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02
    heavy = sum(file.stat().st_size for file in (tmp_path / "int8").iterdir())
    assert heavy < 0.6 * (tmp_path / "model.onnx").stat().st_size + 2000


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_every_operator_become_fp16_and_are_counted(tmp_path: Path, name: str) -> None:
    share, x = written_form(name, tmp_path / "model.onnx")
    path = tmp_path / "fp16" / "model.onnx"
    done, coverage = onnx_source.quantize(tmp_path / "model.onnx", path, rewriter("ort-u8u8"), format="fp16")
    assert set(done.forms) == {"fp16 weights"}
    assert set(coverage.formats) == {"fp16"}
    assert 100 * coverage.share == pytest.approx(share, abs=0.1)
    assert not {"DequantizeLinear", "Cast", "Mul"} & set(ort_session.count_executed_ops(path, "cpu"))
    [got], [want] = run(path, x), run(tmp_path / "model.onnx", x)
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 5e-4


def test_onnx_weights_left_in_float_are_counted_with_a_reason(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx")
    _, coverage = onnx_source.quantize(
        tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", rewriter("ort-u8s8")
    )
    assert "768 values; below 1024" in coverage.left["MatMul"].reason
    assert coverage.left["Gemm"].reason == "vectors are applied in float"


def test_a_source_without_a_weight_to_quantize_is_refused(tmp_path: Path) -> None:
    text = "g (float[b, 8] x) => (float[b, 8] y) <float[8, 8] w> { y = MatMul(x, w) }"
    model = onnx.parser.parse_model(HEAD + text)
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "w"))
    onnx.save(model, str(tmp_path / "model.onnx"))
    with pytest.raises(NotUsableError, match=r"no weight of this model can be int8 \(MatMul: .*below 1024"):
        onnx_source.quantize(tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", rewriter("ort-u8s8"))


@pytest.mark.parametrize("opset", [9, 17])
def test_stored_weights_are_decoded_once_and_not_at_every_call(tmp_path: Path, opset: int) -> None:
    text = "g (float[b, 16, 9, 9] x) => (float[b, 32, 7, 1024] y) <float[32, 16, 3, 3] w, float[7, 1024] m>"
    head = f'<ir_version: 4, opset_import: ["" : {opset}]>'
    model = onnx.parser.parse_model(head + text + "{ c = Conv(x, w)\n y = MatMul(c, m) }")
    del model.graph.initializer[:]
    rng = np.random.default_rng(0)
    for name, shape in (("w", (32, 16, 3, 3)), ("m", (7, 1024))):
        values = rng.standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, str(tmp_path / "model.onnx"))
    path = tmp_path / "int8" / "model.onnx"
    onnx_source.quantize(tmp_path / "model.onnx", path, rewriter("ort-u8u8", "float"))
    executed = ort_session.count_executed_ops(path, "cpu")
    assert not {"DequantizeLinear", "Cast", "Mul"} & set(executed)
    x = rng.standard_normal((2, 16, 9, 9)).astype(np.float32)
    [got], [want] = run(path, x), run(tmp_path / "model.onnx", x)
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02
    if opset == 9:
        with pytest.raises(NotUsableError, match="integer products need an ONNX source of opset 11 or above"):
            onnx_source.quantize(tmp_path / "model.onnx", path, rewriter("ort-u8u8"), {"x": 1.0})


def test_a_file_whose_int8_weights_lose_too_much_is_offered_in_fp16(tmp_path: Path) -> None:
    _, x = written_form("conv", tmp_path / "model.onnx")
    specs = TensorSpec("x", "float32", ("batch", 16, 9, 9)), TensorSpec("y", "float32", ("batch", 32, 9, 9))
    source = OnnxGraph((specs[0],), (specs[1],), {"x": torch.from_numpy(x)}, path=tmp_path / "model.onnx")
    plan = Plan(source="model.onnx", backend="ort", quant="int8", dtype="float32")
    lossy = ort.lower(source, plan, tmp_path / "int8")
    assert lossy.more_exact == (("weights", "mixed"), ("weights", "finer"), ("weights", "fp16"))
    finer = ort.lower(source, plan.with_(backend_options={"weights": "fp16"}), tmp_path / "fp16")
    assert not finer.more_exact
    assert finer.coverage is not None
    assert "are fp16" in finer.coverage.verdict()
    [want] = run(tmp_path / "model.onnx", x)
    errors = [
        np.linalg.norm(run(tmp_path / name / "compiled" / "model.onnx", x)[0] - want)
        for name in ("int8", "fp16")
    ]
    assert 0 < errors[1] < errors[0] / 10


def test_mixed_weights_keep_16_bits_for_the_few_that_move_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of int8 in `loud` is multiplied by 30 behind it; the other two round alike."""
    text = HEAD + (
        "g (float[b, 64] x) => (float[b, 64] y) <float[64, 64] first, float[64, 64] loud, float[64, 64] last> {"
        "a = MatMul(x, first)\n s = MatMul(x, loud)\n c = Constant<value = float {30.0}>()\n m = Mul(s, c)\n"
        "h = Add(a, m)\n t = Tanh(a)\n z = MatMul(t, last)\n y = Add(h, z) }"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name in ("first", "loud", "last"):
        values = rng.standard_normal((64, 64)).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, str(tmp_path / "model.onnx"))
    x = rng.standard_normal((9, 64)).astype(np.float32)
    [want], errors = run(tmp_path / "model.onnx", x), {}
    for format in ("int8", "mixed", "finer", "fp16"):
        path, rows = tmp_path / format / "model.onnx", {"x": torch.from_numpy(x[:4])}
        _, coverage = onnx_source.quantize(tmp_path / "model.onnx", path, None, format=format, rows=rows)
        assert coverage.quantized_values == 3 * 64 * 64
        [got] = run(path, x)
        errors[format] = np.linalg.norm(got - want) / np.linalg.norm(want)
        stored = onnx.load(str(path)).graph.initializer
        halves = {t.name.partition("/")[0] for t in stored if t.data_type == onnx.TensorProto.FLOAT16}
        assert halves == {"int8": set(), "mixed": {"loud"}, "fp16": {"first", "loud", "last"}}.get(
            format, halves
        )
    assert weight_effects.worst(tmp_path / "model.onnx", rows, 4.0) == {"loud"}
    monkeypatch.setattr(weight_effects, "MOST_BYTES", 0)
    weight_effects._effects.cache_clear()
    too_large = weight_effects.worst(tmp_path / "model.onnx", rows, 1.01)
    assert len(too_large) == 1  # by the norms, which are alike
    assert errors["int8"] > 4 * errors["mixed"] > 0
    assert errors["int8"] > 16 * errors["finer"] > 16 * errors["fp16"] > 0


def test_a_weight_behind_a_transposition_is_counted_in_the_format_it_gets(tmp_path: Path) -> None:
    text = "g (float[b, 64] x) => (float[b, 96] y) <float[96, 64] w> { t = Transpose(w)\n y = MatMul(x, t) }"
    model = onnx.parser.parse_model(HEAD + text)
    values = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, "w"))
    onnx.save(model, str(tmp_path / "model.onnx"))
    path, rows = tmp_path / "mixed" / "model.onnx", {"x": torch.ones(2, 64)}
    _, coverage = onnx_source.quantize(tmp_path / "model.onnx", path, None, format="mixed", rows=rows)
    assert coverage.formats == {"fp16": 96 * 64}


def test_a_depthwise_convolution_gets_fp16_for_its_few_products(tmp_path: Path) -> None:
    text = (
        HEAD
        + "g (float[b, 64, 9, 9] x) => (float[b, 64, 9, 9] y) <float[64, 1, 5, 5] d, float[64, 64, 1, 1] p>"
    )
    model = onnx.parser.parse_model(
        text + "{ h = Conv <group = 64, pads = [2, 2, 2, 2]> (x, d)\n y = Conv(h, p) }"
    )
    del model.graph.initializer[:]
    rng = np.random.default_rng(0)
    for name, shape in (("d", (64, 1, 5, 5)), ("p", (64, 64, 1, 1))):
        values = rng.standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, str(tmp_path / "model.onnx"))
    _, coverage = onnx_source.quantize(
        tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", rewriter("ort-u8u8")
    )
    assert coverage.formats == {"fp16": 64 * 25, "int8": 64 * 64}


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((8, 16, 3, 3), 0),
        ((16, 8, 2, 2), 1),
        ((64, 7), 1),
        ((7, 64), 0),
        ((2, 12, 96), 1),
        ((5, 11, 11), 0),
        ((1009, 5), 1),
        ((5, 1009), 0),
        ((3, 67, 4), 2),
    ],
)
def test_int8_codes_have_a_scale_for_each_block(shape: tuple[int, ...], axis: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape).astype(np.float32) * 10.0 ** rng.integers(-3, 2, shape)
    values.reshape(-1)[::7] = 0.0
    codes, share, scale = source_weights.blocks(values, axis)
    assert codes.nbytes + share.nbytes + scale.nbytes < values.nbytes / 2
    decoded = source_weights.decoded(codes, share, scale, shape, axis)
    room = source_weights.decoded(np.ones_like(codes), share, scale, shape, axis) / 2
    assert (np.abs(decoded - values) <= room * 1.001).all()
    whole, per_channel = source_weights.quantized(values, axis)
    wider = np.abs(whole * per_channel - values)
    assert np.linalg.norm(decoded - values) <= np.linalg.norm(wider) * 1.01


def test_weights_that_are_inputs_too_are_inputs_of_no_artifact(tmp_path: Path) -> None:
    _, x = written_form("conv", tmp_path / "model.onnx")
    model = onnx.load(str(tmp_path / "model.onnx"))
    for tensor in model.graph.initializer:
        model.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    model.ir_version = 3
    onnx.save(model, str(tmp_path / "model.onnx"))
    [want] = run(tmp_path / "model.onnx", x)
    onnx_source.copy(tmp_path / "model.onnx", tmp_path / "copy" / "model.onnx")
    _, coverage = onnx_source.quantize(
        tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", rewriter("ort-u8u8")
    )
    assert coverage.quantized_values
    for name, most in (("copy", 1e-5), ("int8", 0.02)):
        there = onnx.load(str(tmp_path / name / "model.onnx"))
        assert [value.name for value in there.graph.input] == ["x"]
        [got] = run(tmp_path / name / "model.onnx", x)
        assert np.linalg.norm(got - want) <= most * np.linalg.norm(want)


def test_weights_of_a_recurrent_layer_whose_gates_are_reordered_are_stored(tmp_path: Path) -> None:
    text = HEAD + (
        "g (float[t, b, 32] x) => (float[t, d, b, 32] y) <float[128, 32] w, float[128, 32] r, int64[1] zero = {0},"
        "int64[1] half = {64}, int64[1] all = {128}> {"
        "a = Slice(w, half, all, zero)\n c = Slice(w, zero, half, zero)\n v = Concat<axis = 0>(a, c)\n"
        "u = Unsqueeze(v, zero)\n s = Unsqueeze(r, zero)\n y = LSTM<hidden_size = 32>(x, u, s) }"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name in ("w", "r"):
        values = rng.standard_normal((128, 32)).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, str(tmp_path / "model.onnx"))
    path = tmp_path / "int8" / "model.onnx"
    _, coverage = onnx_source.quantize(tmp_path / "model.onnx", path, rewriter("ort-u8u8"))
    assert coverage.quantized_values == 2 * 128 * 32
    assert not {"DequantizeLinear", "Cast", "Mul"} & set(ort_session.count_executed_ops(path, "cpu"))
    x = rng.standard_normal((5, 3, 32)).astype(np.float32)
    [got], [want] = run(path, x), run(tmp_path / "model.onnx", x)
    assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02
