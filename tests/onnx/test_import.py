"""The importer: ONNX graphs as torch modules, equal to onnxruntime without optimizations and to ONNX's own tests."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from infer.errors import NotUsableError  # noqa: E402
from infer.graph.capture import capture  # noqa: E402
from infer.load import onnx_program  # noqa: E402
from infer.load.onnx_program.values import NARROW, from_numpy, torch_dtype  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402
from tests.fuzz.onnx_graphs import References, differs  # noqa: E402
from tests.support import random_onnx_graphs as graphs  # noqa: E402

ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the largest value


def imported(text: str, **weights: np.ndarray) -> tuple[onnx_program.OnnxProgram, Any]:
    """Import a model written as text, whose `weights` are initializers; return it and a session of its file."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in weights.items())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnx_program.from_proto(model, Path()), onnxruntime.InferenceSession(
        model.SerializeToString(), options
    )


def graph(opset: int, signature: str, body: str) -> str:
    return f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> g {signature} {{ {body} }}'


def require_equal(program: Any, session: Any, inputs: Mapping[str, np.ndarray]) -> None:
    with torch.no_grad():
        got = program(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    for want, mine in zip(session.run(None, dict(inputs)), got, strict=True):
        assert want.dtype == mine.numpy().dtype
        np.testing.assert_allclose(mine.numpy(), want, rtol=1e-5, atol=1e-5)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ONNX's own tests of single nodes


def _given(value: Any) -> Any:
    if value is None or isinstance(value, list):
        return value and [_given(one) for one in value]
    array = onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)
    number = 8 if array.dtype.kind in "OUS" else onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    try:
        dtype = torch_dtype(number)
    except onnx_program.values.Unsupported as error:
        raise NotUsableError(f"an input of {error}") from error
    return torch.from_numpy(array.astype(str(dtype)[6:])) if number in NARROW else from_numpy(array, dtype)


def _wrong(want: Any, got: Any, rtol: float, atol: float) -> str:
    """Return how an output differs from the one that ONNX gives, or an empty string."""
    if isinstance(want, list):
        return (
            "count"
            if len(want) != len(got)
            else "".join(map(_wrong, want, got, *[[r] * len(got) for r in (rtol, atol)]))
        )
    if want is None or got is None:
        return "" if want is got else "absent"
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if not want.is_floating_point() and not want.is_complex():
        return "" if torch.equal(want, got) else f"{got}, not {want}"
    rounding = ROUNDING.get(want.dtype, 1e-6)
    wide = torch.complex128 if want.is_complex() else torch.float64
    want, got = want.to(wide), got.to(wide)
    finite = want.abs()[want.abs().isfinite()]
    room = max(atol, rounding * float(finite.max()) if finite.numel() else 0.0)
    close = torch.allclose(got, want, rtol=max(rtol, rounding), atol=room, equal_nan=True)
    return "" if close else f"{got}, not {want}"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Run every node test: its name → "right", "refused: …" or "wrong: …"."""
    from onnx.backend.test.loader import load_model_tests

    found = {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for case in load_model_tests(kind="node"):
            try:
                program = onnx_program.from_proto(case.model, Path())
                names, said = program.inputs, ""
                for inputs, outputs in case.data_sets:
                    with torch.no_grad():
                        got = program(**dict(zip(names, map(_given, inputs), strict=True)))
                    said += _wrong([_given(value) for value in outputs], list(got), case.rtol, case.atol)
                found[case.name] = f"wrong: {said}" if said else "right"
            except NotUsableError as error:
                found[case.name] = f"refused: {error}"
    return found


def test_no_node_test_of_onnx_comes_out_wrong(outcomes: dict[str, str]) -> None:
    assert {name: said for name, said in outcomes.items() if said.startswith("wrong")} == {}


def test_nine_of_ten_node_tests_of_onnx_are_right(outcomes: dict[str, str]) -> None:
    right = sum(said == "right" for said in outcomes.values())
    assert right >= 0.9 * len(outcomes), f"{right} of {len(outcomes)}"


def test_what_is_not_imported_is_refused_by_its_name(outcomes: dict[str, str]) -> None:
    named = ("refused: not imported: operator ", "refused: not imported: opset ", "refused: an input of ")
    assert {
        said for said in outcomes.values() if said.startswith("refused") and not said.startswith(named)
    } == set()


# Graphs of several nodes


@pytest.mark.parametrize("seed", range(0, 120, 3))
def test_random_graphs_equal_onnxruntime_as_written(seed: int) -> None:
    model = graphs.make(seed)
    rows, references = graphs.rows(model, 8, seed), References(model)
    program = onnx_program.from_proto(model, Path())
    with torch.no_grad():
        got = [value.numpy() for value in program(x=torch.from_numpy(rows))]
    want = references.answers(rows)[0]
    assert differs(want, got, references.room(rows, want)) == ""


@pytest.mark.parametrize("seed", [0, 1, 3, 8, 9, 15])
def test_captured_random_graphs_run_at_other_batches(seed: int) -> None:
    model = graphs.make(seed)
    shape = [d.dim_value or "batch" for d in model.graph.input[0].type.tensor_type.shape.dim]
    rows, references = graphs.rows(model, 7, seed), References(model)
    spec = TensorSpec("x", str(rows.dtype), tuple(shape))
    captured = capture(onnx_program.from_proto(model, Path()), (spec,), {"x": torch.from_numpy(rows[:2])})
    with torch.no_grad():
        got = [value.numpy() for value in captured.run({"x": torch.from_numpy(rows)}).values()]
    want = references.answers(rows)[0]
    assert differs(want, got, references.room(rows, want)) == ""


SIZES = """
    s = Shape (x)
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    two = Constant <value = int64[1] {2}> ()
    axis = Constant <value = int64[1] {0}> ()
    batch = Gather <axis = 0> (s, zero)
    time = Gather <axis = 0> (s, one)
    b = Unsqueeze (batch, axis)
    t = Unsqueeze (time, axis)
    twice = Mul (t, two)
    shape = Concat <axis = 0> (b, twice)
    y = Reshape (x, shape)
    filled = ConstantOfShape <value = float[1] {1.5}> (shape)
    z = Add (y, filled)
"""


# As torch's exporters write expand() and arange(): -1 in a wanted shape keeps a size, positions count up to one.
EXPANDED = """
    s = Shape (x)
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    axis = Constant <value = int64[1] {0}> ()
    keep = Constant <value = int64[1] {-1}> ()
    length = Constant <value = int64[1] {2}> ()
    time = Gather <axis = 0> (s, one)
    batch = Slice (s, axis, length)
    wanted = Concat <axis = 0> (batch, keep)
    ones = ConstantOfShape <value = int64[1] {1}> (length3)
    none = Mul (ones, keep)
    asked = Equal (wanted, none)
    shape = Where (asked, ones, wanted)
    places = Range (zero, time, one)
    f = Cast <to = 1> (places)
    column = Unsqueeze (f, length1)
    grown = Expand (column, shape)
    z = Add (grown, x)
"""


@pytest.mark.parametrize(
    ("body", "result"),
    [(SIZES, "(float[b, h] z)"), (EXPANDED, "(float[b, t, 2] z)")],
    ids=["shape", "expand"],
)
def test_sizes_computed_from_shapes_stay_symbolic(body: str, result: str) -> None:
    given = {"length3": np.array([3]), "length1": np.array([1])} if body is EXPANDED else {}
    program, session = imported(graph(17, f"(float[batch, time, 2] x) => {result}", body), **given)
    spec = TensorSpec("x", "float32", ("batch", "time", 2))
    captured = capture(
        program, (spec,), {"x": torch.randn(2, 4, 2)}, sizes={"batch": (1, 64), "time": (1, 64)}
    )
    for shape in ((5, 9, 2), (3, 1, 2)):
        require_equal(lambda x: list(captured.run({"x": x}).values()), session, {"x": floats(*shape)})
    assert not any("_scalar_dense" in str(node.target) for node in captured.exported.graph.nodes)


# Layers


def kinds(program: nn.Module) -> list[str]:
    return sorted(type(m).__name__ for m in program.modules() if type(m).__module__.startswith("torch.nn"))


def test_a_product_and_its_bias_become_one_linear_layer() -> None:
    body = "h = MatMul (x, w)\n y = Add (c, h)\n z = Gemm <transB = 1> (y, v, d)"
    text = graph(17, "(float[n, 8] x) => (float[n, 3] z)", body)
    program, session = imported(text, w=floats(8, 4), c=floats(4), v=floats(3, 4), d=floats(3))
    assert kinds(program) == ["Linear", "Linear"]
    require_equal(program, session, {"x": floats(5, 8)})


def test_a_lookup_becomes_an_embedding_with_negative_ids() -> None:
    text = graph(17, "(int64[n] x) => (float[n, 16] y)", "y = Gather <axis = 0> (w, x)")
    program, session = imported(text, w=floats(32, 16))
    assert kinds(program) == ["Embedding"]
    require_equal(program, session, {"x": np.array([0, -1, 31, -32])})


@pytest.mark.parametrize(
    "options", ["", "auto_pad = 'SAME_UPPER',", "pads = [1, 0, 0, 2],", "pads = [1, 1, 1, 1],"]
)
def test_a_convolution_becomes_a_layer_with_any_padding(options: str) -> None:
    options = options.replace("'", '"')
    body = f"y = Conv <{options} strides = [2, 2], kernel_shape = [3, 3]> (x, w, b)"
    program, session = imported(
        graph(17, "(float[n, 2, 9, 7] x) => (float[n, 5, h, v] y)", body), w=floats(5, 2, 3, 3), b=floats(5)
    )
    assert kinds(program) == ["Conv2d"]
    require_equal(program, session, {"x": floats(3, 2, 9, 7)})


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_recurrent_operators_become_layers_of_torch(op: str, direction: str) -> None:
    count, gates = 2 if direction == "bidirectional" else 1, {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    reset = ", linear_before_reset = 1" if op == "GRU" else ""
    body = f'y, h = {op} <hidden_size = 6, direction = "{direction}"{reset}> (x, w, r, b)'
    text = graph(17, "(float[t, n, 3] x) => (float[t, d, n, 6] y, float[d, n, 6] h)", body)
    w, r = floats(count, gates * 6, 3), floats(count, gates * 6, 6, seed=1) / 2
    program, session = imported(text, w=w, r=r, b=floats(count, 2 * gates * 6, seed=2))
    assert kinds(program) == [op]
    require_equal(program, session, {"x": floats(4, 2, 3)})


def test_codes_of_a_weight_become_a_layer_of_its_values() -> None:
    body = "w = DequantizeLinear <axis = 1> (codes, scale)\n y = MatMul (x, w)"
    codes = np.arange(-16, 16, dtype=np.int8).reshape(8, 4)
    program, session = imported(
        graph(17, "(float[n, 8] x) => (float[n, 4] y)", body), codes=codes, scale=np.abs(floats(4))
    )
    assert kinds(program) == ["Linear"]
    require_equal(program, session, {"x": floats(5, 8)})


# Versions, names, refusals


@pytest.mark.parametrize(("opset", "want"), [(11, 1 / 6), (13, 1 / 3)])
def test_softmax_takes_all_axes_as_one_before_opset_13(opset: int, want: float) -> None:
    text = graph(opset, "(float[n, 2, 3] x) => (float[n, 2, 3] y)", "y = Softmax <axis = 1> (x)")
    program, session = imported(text.replace("axis = 1", "axis = 2") if opset == 13 else text)
    require_equal(program, session, {"x": np.zeros((2, 2, 3), np.float32)})
    assert float(program(x=torch.zeros(1, 2, 3))[0][0, 0, 0]) == pytest.approx(want)


# Operator → opset, outputs, nodes: attributes in place of the inputs of today.
OLD = {
    "Clip": (10, "float y", "y = Clip <min = -0.5, max = 0.5> (x)"),
    "Clip from above": (10, "float y", "y = Clip <max = 0.5> (x)"),
    "Pad": (10, "float y", "y = Pad <pads = [0, 0, 1, 0, 0, 2], value = 3.0> (x)"),
    "Slice": (9, "float y", "y = Slice <starts = [1, -2], ends = [9, 100], axes = [1, 2]> (x)"),
    "Split": (11, "float y, float z", "y, z = Split <axis = 2, split = [1, 3]> (x)"),
    "TopK": (9, "float y, int64 p", "y, p = TopK <axis = 2, k = 2> (x)"),
    "Upsample": (
        *(8, "float y"),
        "image = Unsqueeze <axes = [0]> (x) y = Upsample <scales = [1.0, 1.0, 2.0, 3.0]> (image)",
    ),
    "ReduceSum": (11, "float y", "y = ReduceSum <axes = [2], keepdims = 0> (x)"),
    "DFT": (
        17,
        "float y",
        "axis = Constant <value_ints = [-1]> () r = Unsqueeze (x, axis) y = DFT <axis = 2> (r)",
    ),
    "sizes": (
        *(9, "float y, float z"),
        """
        s = Shape (x)
        t = Slice <starts = [1], ends = [2]> (s)
        u = Squeeze <axes = [0]> (t)
        v = Unsqueeze <axes = [0]> (u)
        w, h = Split <axis = 0, split = [1, 2]> (s)
        p = ReduceProd <axes = [0]> (h)
        shape = Concat <axis = 0> (w, p)
        y = Reshape (x, shape)
        f = Cast <to = 1> (v)
        z = Add (y, f)
        """,
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_attributes_that_became_inputs_are_taken(case: str) -> None:
    opset, outputs, body = OLD[case]
    program, session = imported(graph(opset, f"(float[n, 5, 4] x) => ({outputs})", body))
    require_equal(program, session, {"x": floats(2, 5, 4)})


def test_names_of_inputs_that_are_no_identifiers_are_taken() -> None:
    model = onnx.parser.parse_model(graph(17, "(float[n, 2] x) => (float[n, 2] y)", "y = Relu (x)"))
    model.graph.input[0].name = model.graph.node[0].input[0] = "serving/x:0"
    program = onnx_program.from_proto(model, Path())
    spec = TensorSpec("serving/x:0", "float32", ("batch", 2))
    captured = capture(program, (spec,), {"serving/x:0": torch.randn(2, 2)})
    given = {"serving/x:0": torch.tensor([[-1.0, 2.0]] * 3)}
    assert next(iter(captured.run(given).values())).tolist() == [[0.0, 2.0]] * 3


def test_an_operator_without_a_torch_form_is_named_with_its_node() -> None:
    model = onnx.parser.parse_model(graph(17, "(float[n, 2] x) => (float[n, 2] y)", "y = Relu (x)"))
    model.graph.node[0].op_type, model.graph.node[0].name = "Warp", "/encoder/warp"
    with pytest.raises(
        onnx_program.NotImportedError, match=r"operator Warp \(opset 17\) at node '/encoder/warp'"
    ):
        onnx_program.from_proto(model, Path())


def test_a_branch_by_a_constant_condition_is_taken_at_import() -> None:
    body = """y = If (c) <
        then_branch = a () => (float[n, 2] p) { p = Relu (x) },
        else_branch = b () => (float[n, 2] q) { q = Warp (x) }>"""
    model = onnx.parser.parse_model(graph(17, "(float[n, 2] x) => (float[n, 2] y)", body))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "c"))
    program = onnx_program.from_proto(model, Path())
    assert program(x=torch.tensor([[-1.0, 2.0]]))[0].tolist() == [[0.0, 2.0]]


def test_external_data_is_mapped_from_its_file(tmp_path: Path) -> None:
    text = graph(17, "(float[n, 64] x) => (float[n, 64] y)", "y = MatMul (x, w)")
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(floats(64, 64), "w"))
    path = tmp_path / "model.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    x = floats(2, 64)
    got = onnx_program.import_onnx(path)(x=torch.from_numpy(x))[0]
    np.testing.assert_allclose(got.detach().numpy(), x @ floats(64, 64), rtol=1e-4, atol=1e-4)
