"""ONNX models of other converters: scikit-learn's maps and texts, tf2onnx's names, models quantized before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from infer import Predictor  # noqa: E402
from infer.errors import NotUsableError, SourceError, UsageError  # noqa: E402
from infer.load import LoadedModel, load  # noqa: E402
from infer.plan import Plan  # noqa: E402
from infer.run import stages  # noqa: E402

LABELS = ("no", "perhaps", "yes")


def save(
    path: Path, nodes: list, inputs: list, outputs: list, weights: dict[str, np.ndarray], **given: object
) -> Path:
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path), **given)
    return path


def classifier(path: Path, *, texts: bool, zipped: bool = True, **given: object) -> Path:
    """Logistic regression as skl2onnx writes it: label and probabilities, the latter as a sequence of maps."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(6, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
    keys = {"classlabels_strings": LABELS} if texts else {"classlabels_int64s": [0, 1, 2]}
    nodes = [
        helper.make_node("Gemm", ["X", "w", "b"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["scores"], ["index"], axis=1, keepdims=0),
    ]
    element = TensorProto.STRING if texts else TensorProto.INT64
    if texts:
        table = helper.make_tensor("names", TensorProto.STRING, [3], [label.encode() for label in LABELS])
        nodes += [
            helper.make_node("Constant", [], ["table"], value=table),
            helper.make_node("Gather", ["table", "index"], ["output_label"]),
        ]
    else:
        nodes.append(helper.make_node("Identity", ["index"], ["output_label"]))
    outputs = [helper.make_tensor_value_info("output_label", element, [None])]
    if zipped:
        nodes.append(
            helper.make_node("ZipMap", ["probabilities"], ["output_probability"], domain="ai.onnx.ml", **keys)
        )
        kind = helper.make_map_type_proto(element, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        outputs.append(helper.make_value_info("output_probability", helper.make_sequence_type_proto(kind)))
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 6])]
    return save(path, nodes, inputs, outputs, weights, **given)


def finding_reasons(loaded: LoadedModel, what: str) -> list[str]:
    return [finding.why for finding in loaded.findings if finding.what == what]


@pytest.mark.parametrize("texts", [False, True])
def test_probabilities_are_a_tensor_and_texts_are_left_out(tmp_path: Path, texts: bool) -> None:
    path = classifier(tmp_path / "model.onnx", texts=texts)
    before = path.read_bytes()
    made = stages.optimize(
        Plan(source=str(path), backend="ort", data="random", batches=(), allow_slower=True),
        tmp_path / "out.infer",
    )
    x = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    with Predictor.load(made.path) as predictor:
        got = predictor.predict({"X": x})
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(str(path)).graph.initializer}
    scores = x @ weights["w"] + weights["b"]
    expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(got["probabilities"], expected, rtol=1e-4)
    assert list(got) == (["probabilities"] if texts else ["output_label", "probabilities"])
    assert texts or np.array_equal(got["output_label"], scores.argmax(1))
    assert path.read_bytes() == before


def test_dropped_onnx_outputs_are_reported_with_class_names(tmp_path: Path) -> None:
    loaded = load(Plan(source=str(classifier(tmp_path / "m.onnx", texts=True)), data="random"))
    assert finding_reasons(loaded, "outputs") == [
        "left output 'output_label': it is of dtype string, not a tensor of numbers",
        "'output_probability', a sequence of maps, is the tensor 'probabilities': columns no, perhaps, yes",
    ]
    assert [spec.format() for spec in loaded.meta["outputs"]] == ["probabilities=float32[batch,3]"]
    assert loaded.file is not None
    folder = loaded.file.parent
    assert folder.is_dir()
    del loaded
    assert not folder.exists()


def test_external_weights_come_along_and_plain_models_are_not_copied(tmp_path: Path) -> None:
    given = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    loaded = load(Plan(source=str(classifier(tmp_path / "m.onnx", texts=True, **given)), data="random"))
    model = onnx.load(str(loaded.file))
    assert {t.name for t in model.graph.initializer} == {"w", "b"}
    plain = classifier(tmp_path / "plain.onnx", texts=False, zipped=False)
    assert load(Plan(source=str(plain), data="random")).file == plain


def test_a_model_of_string_outputs_only_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = classifier(tmp_path / "m.onnx", texts=True, zipped=False)
    with pytest.raises(
        NotUsableError, match="no output of the model is a tensor of numbers.*dtype string.*zipmap"
    ):
        load(Plan(source=str(path), data="random"))


def test_a_model_of_string_inputs_is_refused_with_what_to_convert(tmp_path: Path) -> None:
    nodes = [helper.make_node("LabelEncoder", ["city"], ["code"], domain="ai.onnx.ml", keys_strings=["a", "b"],
                              values_floats=[0.0, 1.0])]  # fmt: skip
    city = helper.make_tensor_value_info("city", TensorProto.STRING, ["batch", 1])
    code = helper.make_tensor_value_info("code", TensorProto.FLOAT, ["batch", 1])
    path = save(tmp_path / "m.onnx", nodes, [city], [code], {})
    with pytest.raises(
        NotUsableError, match=r"expected inputs of numbers, 'city' is of dtype string"
    ) as caught:
        load(Plan(source=str(path), data="random"))
    assert "pipeline[-1]" in str(caught.value.hint)


def test_names_and_sizes_of_tf2onnx_are_read_as_a_batch(tmp_path: Path) -> None:
    name = "serving_default_x:0"
    weights = {"dense/MatMul/ReadVariableOp:0": np.eye(6, 3, dtype=np.float32)}
    nodes = [helper.make_node("MatMul", [name, *weights], ["Identity:0"])]
    value = helper.make_tensor_value_info
    inputs = [value(name, TensorProto.FLOAT, ["unk__5", 6])]
    path = save(
        tmp_path / "m.onnx", nodes, inputs, [value("Identity:0", TensorProto.FLOAT, ["unk__6", 3])], weights
    )
    loaded = load(Plan(source=str(path), data="random"))
    assert [spec.format() for spec in loaded.inputs] == [f"{name}=float32[batch,6]"]
    assert [spec.format() for spec in loaded.meta["outputs"]] == ["Identity:0=float32[batch,3]"]
    fixed = load(Plan(source=str(path), data="random", inputs=(f"{name}=float32[4,6]",)))
    assert fixed.inputs[0].shape == (4, 6)


@pytest.mark.parametrize(
    ("first", "expected"), [("N", "batch"), ("batch_size", "batch"), ("batch", "batch"), (2, 2)]
)
def test_the_first_size_that_all_inputs_share_is_the_batch(
    tmp_path: Path, first: object, expected: object
) -> None:
    value = helper.make_tensor_value_info
    inputs = [value(name, TensorProto.FLOAT, [first, 6]) for name in "ab"]
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, inputs, [value("y", TensorProto.FLOAT, [first, 6])], {})
    loaded = load(Plan(source=str(path), data="random"))
    assert {spec.shape[0] for spec in (*loaded.inputs, *loaded.meta["outputs"])} == {expected}


def test_different_first_sizes_keep_their_names(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    inputs = [value("a", TensorProto.FLOAT, ["N", 6]), value("b", TensorProto.FLOAT, ["M", 6])]
    nodes = [helper.make_node("Concat", ["a", "b"], ["y"], axis=0)]
    path = save(tmp_path / "m.onnx", nodes, inputs, [value("y", TensorProto.FLOAT, ["N + M", 6])], {})
    assert [s.shape[0] for s in load(Plan(source=str(path), data="random")).inputs] == ["N", "M"]


def test_quantized_onnx_models_are_kept_and_reported(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    weights = {
        "w": np.ones((64, 64), np.int8), "s": np.float32(0.1), "z": np.int8(0), "xs": np.float32(0.05),
        "xz": np.uint8(128),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"]),
        helper.make_node("MatMul", ["d", "wd"], ["y"]),
    ]
    inputs, outputs = ([value(n, TensorProto.FLOAT, ["batch", 64])] for n in "xy")
    path = save(tmp_path / "m.onnx", nodes, inputs, outputs, {k: np.asarray(v) for k, v in weights.items()})
    plan = Plan(source=str(path), backend="ort", data="random", batches=(), allow_slower=True)
    assert finding_reasons(load(plan), "quantized already") == [
        "2 DequantizeLinear, 1 QuantizeLinear: kept as they are"
    ]
    for quant in ("int8", "int8:static"):
        with pytest.raises(UsageError, match="quantized already .*2 DequantizeLinear.*--quant none keeps it"):
            stages.optimize(plan.with_(quant=quant), tmp_path / "int8.infer")
    made = stages.optimize(plan, tmp_path / "out.infer")
    assert (made.path / "compiled" / "model.onnx").read_bytes() == path.read_bytes()


def saved_model(folder: Path, *, version: int, inputs: bool) -> Path:
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])] if inputs else []
    node = helper.make_node("Identity", ["x"], ["y"])
    if not inputs:
        node = helper.make_node("Constant", [], ["y"], value=numpy_helper.from_array(np.ones(3, np.float32)))
    graph = helper.make_graph([node], "g", given, [value])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=version)
    (folder / "m.onnx").write_bytes(made.SerializeToString())
    return folder / "m.onnx"


def test_a_model_without_inputs_is_refused(tmp_path: Path) -> None:
    source = saved_model(tmp_path, version=8, inputs=False)
    with pytest.raises(SourceError, match="the ONNX model has no inputs: its outputs are constants"):
        load(Plan(source=str(source), data="random"))


def test_a_model_of_a_newer_onnx_says_so(tmp_path: Path) -> None:
    source = saved_model(tmp_path, version=99, inputs=True)
    with pytest.raises(SourceError, match="has IR version 99, onnx .* reads up to") as caught:
        load(Plan(source=str(source), data="random"))
    assert caught.value.hint.startswith("Upgrade onnx and onnxruntime")
