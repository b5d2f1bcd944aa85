"""Folders that Optimum wrote: which file is opened, and what config.json and the tokenizer beside it make of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("transformers")

from onnx import TensorProto, helper  # noqa: E402

from infer.errors import InferError, NotUsableError, UsageError  # noqa: E402
from infer.load import load  # noqa: E402
from infer.load.identification.identify import identify  # noqa: E402
from infer.load.loaded_model import LoadedModel  # noqa: E402
from infer.plan import Plan  # noqa: E402
from tests.support.tiny_heads import SMALL, save_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = ("input_ids", "attention_mask", "token_type_ids")
CLASSIFIER = "BertForSequenceClassification"


def write(
    path: Path,
    inputs: Sequence[str] = IDS,
    outputs: Sequence[str] = ("logits",),
    labels: int = 3,
    dims: Sequence[str | None] = ("batch_size", "sequence_length"),
) -> None:
    """Write a graph of the tensors of a text model, each output a row of `labels` sums over the tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["ids", "mask"], ["real"]),
        helper.make_node("ReduceMean", ["real"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("MatMul", ["mean", "w"], [outputs[0]]),
        *(helper.make_node("Relu", [outputs[0]], [name]) for name in outputs[1:]),
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1, labels], [0.1, -0.2, 0.3, 0.4][:labels])
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.INT64, dims) for name in inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [dims[0], labels]) for name in outputs],
        [weight],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def describe(folder: Path, architecture: str = CLASSIFIER, **changes: object) -> None:
    """Write config.json and a tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **SMALL,
        "vocab_size": save_tokenizer(folder),
        "max_position_embeddings": 64,
        "model_type": "bert",
        "architectures": [architecture],
        "id2label": {"0": "bad", "1": "good", "2": "so"},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))


def opened(source: Path) -> LoadedModel:
    return load(Plan(source=str(source), data="random"))


def task_finding(loaded: LoadedModel) -> str:
    return next(finding.why for finding in loaded.findings if finding.what == "task")


@pytest.mark.parametrize("file", ["model.onnx", "onnx/model.onnx"])
@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_file_takes_the_task_of_the_folder_that_describes_it(tmp_path: Path, file: str, named: str) -> None:
    describe(tmp_path)
    write(tmp_path / file)
    found = opened(tmp_path if named == "folder" else tmp_path / file)
    assert (found.kind, found.task, found.meta["labels"]) == ("onnx", "classification", ["bad", "good", "so"])
    assert [spec.format() for spec in found.inputs] == [f"{name}=int64[batch,seq]" for name in IDS]
    assert found.meta["outputs"][0].format() == "logits=float32[batch,3]"
    assert found.sizes["seq"] == (1, 64)
    assert {"config.json", "tokenizer.json"} <= found.files.keys()


def test_sizes_without_names_are_named_by_the_task(tmp_path: Path) -> None:
    describe(tmp_path)
    write(tmp_path / "model.onnx", dims=(None, None))
    found = opened(tmp_path)
    assert {spec.format() for spec in found.inputs} == {f"{name}=int64[batch,seq]" for name in IDS}
    assert found.meta["outputs"][0].format() == "logits=float32[batch,3]"


@pytest.mark.parametrize(
    ("architecture", "inputs", "outputs", "says"),
    [
        (CLASSIFIER, (*IDS, "position_ids"), ("logits",), "takes position_ids, which its task does not make"),
        (CLASSIFIER, IDS, ("scores",), "gives scores and no logits"),
        ("BertModel", IDS, ("last_hidden_state",), "no sentence_embedding: the pooling is not in the file"),
        ("BertForMultipleChoice", IDS, ("logits",), "BertForMultipleChoice are computed"),
        ("BertLMHeadModel", IDS, ("logits",), "BertLMHeadModel generates"),
        ("UnknownForNothing", IDS, ("logits",), "infer has no task for the head of UnknownForNothing"),
    ],
)
def test_a_file_of_other_tensors_stays_one_of_tensors(
    tmp_path: Path, architecture: str, inputs: tuple[str, ...], outputs: tuple[str, ...], says: str
) -> None:
    describe(tmp_path, architecture, is_decoder=architecture == "BertLMHeadModel")
    write(tmp_path / "model.onnx", inputs, outputs)
    found = opened(tmp_path)
    assert found.task == "tensors"
    assert says in task_finding(found)


def test_the_embedding_of_a_file_with_its_pooling_comes_first(tmp_path: Path) -> None:
    describe(tmp_path, "BertModel")
    write(tmp_path / "model.onnx", IDS[:2], ("token_embeddings", "sentence_embedding"))
    found = opened(tmp_path)
    assert found.task == "embedding"
    assert found.outputs == ("sentence_embedding", "token_embeddings")


def test_of_several_files_the_float_one_is_opened_and_said(tmp_path: Path) -> None:
    for name in ("model.onnx", "model_quantized.onnx"):
        write(tmp_path / name)
    found = identify(tmp_path)
    assert found.file == tmp_path / "model.onnx"
    assert "model.onnx of the folder, the float one of 2; another by" in found.says
    assert found.says.endswith("model_quantized.onnx")
    assert identify(tmp_path / "model_quantized.onnx").kind == "onnx"


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        (("a.onnx", "b.onnx"), UsageError, "holds 2 models: a.onnx, b.onnx .*Name one: .*a.onnx"),
        (
            (
                "encoder_model.onnx",
                "decoder_model.onnx",
                "decoder_model_merged.onnx",
                "decoder_with_past_model.onnx",
            ),
            NotUsableError,
            r"parts of a model that generates .*decoder_with_past_model\.onnx.*, or .*/encoder_model\.onnx alone",
        ),
        (("onnx/decoder_model_merged.onnx",), NotUsableError, "Give the model that they were exported from"),
    ],
)
def test_a_folder_without_one_model_is_refused(
    tmp_path: Path, names: tuple[str, ...], error: type[InferError], says: str
) -> None:
    for name in names:
        write(tmp_path / name)
    with pytest.raises(error, match=says):
        identify(tmp_path)


def test_a_decoder_whose_cache_is_inputs_is_refused(tmp_path: Path) -> None:
    cache = [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    write(tmp_path / "model.onnx", (*IDS[:2], *cache))
    with pytest.raises(NotUsableError, match=r"past_key_values\.0\.key and 3 more.*Give the model"):
        opened(tmp_path)


def test_weights_of_torch_come_before_exported_files(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    describe(tmp_path)
    write(tmp_path / "model.onnx")
    save_file({}, tmp_path / "model.safetensors")
    assert identify(tmp_path).kind == "huggingface"
