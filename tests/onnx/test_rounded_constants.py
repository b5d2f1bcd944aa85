"""Copies of a file of 8-bit codes, its constants rounded elsewhere, tell which of its answers no engine decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from infer import device  # noqa: E402
from infer.fidelity.input_rounding import beyond_rounding  # noqa: E402
from infer.onnx.ort_session import AS_USERS, EXACT, USUAL, OrtRunner, SessionSettings  # noqa: E402
from infer.onnx.source.rounded_constants import ROUNDING, write_rounded  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402

WIDE, NARROW, GAIN = 256, 8, 1.1
X, Y = TensorSpec("x", "float32", ("batch", WIDE)), TensorSpec("y", "float32", ("batch", NARROW))


def save(path: Path, *, steps: bool = True, weight: float = 1.0, scale: float = 0.5) -> Path:
    """Write x clipped to codes, times int8 weights, clipped to codes again; without `steps` in float between."""
    generator = np.random.default_rng(0)
    codes = (
        generator.integers(-127, 127, (WIDE, NARROW)) if weight < 0 else np.full((WIDE, NARROW), 127 * weight)
    )
    values = {
        "in": np.float32(1 / 255),
        "out": np.float32(scale),
        "zero": np.uint8(0),
        "middle": np.uint8(128),
        "w": codes.astype(np.int8),
        "of_w": np.float32(1 / 127),
        "no": np.int8(0),
        "gain": np.float32(GAIN),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "in", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "in", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "of_w", "no"], ["wd"]),
        helper.make_node("MatMul", ["xd" if steps else "x", "wd"], ["p" if steps else "y"]),
        helper.make_node("Mul", ["p", "gain"], ["g"]),
        helper.make_node("QuantizeLinear", ["g", "out", "middle"], ["pq"]),
        helper.make_node("DequantizeLinear", ["pq", "out", "middle"], ["y"]),
    ]
    nodes = nodes if steps else nodes[2:4]
    graph = helper.make_graph(
        nodes,
        "codes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", NARROW])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def opened(path: Path, settings: SessionSettings) -> OrtRunner:
    return OrtRunner(path, (X,), (Y,), "cpu", settings=settings)


def test_float_constants_alone_move_by_a_rounding_and_no_steps_of_codes(tmp_path: Path) -> None:
    write_rounded(save(tmp_path / "m.onnx"), tmp_path / "r.onnx", seed=0)
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in onnx.load(str(tmp_path / name)).graph.initializer}
        for name in ("m.onnx", "r.onnx")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name == "gain":
            assert 0 < abs(after[name] / value - 1) < 2 * ROUNDING
        else:
            assert (after[name] == value).all(), "codes, and the steps between them"


def test_an_answer_on_the_edge_of_a_code_is_no_difference(tmp_path: Path) -> None:
    """Inputs beyond the range are clipped, so that rounding of them moves nothing."""
    edge = 99.5  # codes: each product, 256, lies between two of them
    path = save(tmp_path / "m.onnx", scale=GAIN * WIDE / edge)
    x = {"x": torch.full((4, WIDE), 9.0)}
    exact = opened(path, EXACT)
    others = []
    for seed in range(4):
        write_rounded(path, tmp_path / f"{seed}.onnx", seed)
        others.append(opened(tmp_path / f"{seed}.onnx", EXACT).run)
    answer, step = exact.run(x)["y"], GAIN * WIDE / edge

    def judged(shift: float) -> torch.Tensor:
        run = beyond_rounding(exact.run, lambda given: {"y": answer + shift}, (X,), others)
        return run(x)["y"]

    assert torch.equal(judged(step), answer)
    assert torch.equal(judged(-step), answer)
    assert (judged(10 * step) - answer).min() > 7 * step


def test_constants_that_sizes_follow_from_stay_as_they_are(tmp_path: Path) -> None:
    """An image of 7.2 by 9.6 times its size, by a scale and by sizes that the graph computes."""
    text = (
        '<ir_version: 9, opset_import: ["" : 17]> g (float[b, 1, 5, 5] x) => (float[b, 1, h, w] y)'
        "<float[4] scales = {1.0, 1.0, 7.2, 9.6}, float[4] twice = {1.0, 1.0, 2.0, 0.5},"
        "float[1, 1, 1, 5] w = {1.1, 1.2, 1.3, 1.4, 1.7}>"
        "{ a = Mul(x, w)\n r = Resize(a, , scales)\n s = Shape(r)\n f = Cast<to = 1>(s)\n t = Mul(f, twice)\n"
        "i = Floor(t)\n n = Cast<to = 7>(i)\n y = Resize(r, , , n) }"
    )
    onnx.save(onnx.parser.parse_model(text), str(tmp_path / "m.onnx"))
    x = np.ones((2, 1, 5, 5), np.float32)
    specs = (TensorSpec("x", "float32", ("b", 1, 5, 5)),), (TensorSpec("y", "float32", ("b", 1, "h", "w")),)
    want = OrtRunner(tmp_path / "m.onnx", *specs, "cpu", settings=EXACT).run_arrays({"x": x})["y"]
    for seed in range(8):
        write_rounded(tmp_path / "m.onnx", tmp_path / "r.onnx", seed)
        got = OrtRunner(tmp_path / "r.onnx", *specs, "cpu", settings=EXACT).run_arrays({"x": x})["y"]
        assert got.shape == want.shape
        assert not np.array_equal(got, want)


@pytest.mark.parametrize("other", [None, torch.ones(4, 3)], ids=["does not run", "another shape"])
def test_a_rounded_copy_of_other_sizes_excuses_nothing(other: torch.Tensor | None) -> None:
    answer = torch.ones(4, 2)
    answers = [lambda given: None if other is None else {"y": other}]
    run = beyond_rounding(lambda given: {"y": answer}, lambda given: {"y": answer + 1}, (X,), answers)
    assert torch.equal(run({"x": torch.ones(4, WIDE)})["y"], answer + 1)


@pytest.mark.skipif(device.has_vnni(), reason="products of 8 bits do not saturate on a CPU with VNNI")
def test_products_of_signed_weights_do_not_saturate_here(tmp_path: Path) -> None:
    """Two products of 255 and 127 are above 32,767, where the usual kernel of a CPU without VNNI ends."""
    path, x = save(tmp_path / "m.onnx", scale=4.0), {"x": torch.ones(4, WIDE)}
    expected = opened(path, EXACT).run(x)["y"]
    torch.testing.assert_close(opened(path, USUAL).run(x)["y"], expected, rtol=0, atol=4.0)
    assert (opened(path, AS_USERS).run(x)["y"] - expected).abs().min() > 8, "the fault that is kept out"
