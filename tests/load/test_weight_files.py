"""Weights of a Hugging Face folder as they are found: pickles, shards, an index or one of its files as the source."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from infer.errors import InferError, SourceError, UnsafeSourceError, UsageError
from infer.load import LoadedModel, fill, identify, load
from infer.plan import Plan

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
INDEX = "pytorch_model.bin.index.json"


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def model() -> BertForSequenceClassification:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, architectures=["BertForSequenceClassification"],
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


@pytest.fixture
def folder(tmp_path: Path, model: BertForSequenceClassification) -> Path:
    model.config.save_pretrained(tmp_path)
    return tmp_path


def opened(source: Path) -> LoadedModel:
    loaded = load(Plan(source=str(source), data="random"))
    fill(loaded)
    return loaded


def assert_is(loaded: LoadedModel, model: BertForSequenceClassification) -> None:
    ones = torch.ones_like(IDS)
    with torch.no_grad():
        given = {"input_ids": IDS, "attention_mask": ones, "token_type_ids": 0 * ones}
        expected = model(**given).logits
        got = loaded.module(**{spec.name: given[spec.name] for spec in loaded.inputs})
    torch.testing.assert_close(got, expected)


def save_shards(state: dict[str, Tensor], folder: Path) -> None:
    names = list(state)
    placed = {name: f"pytorch_model-0000{1 + index % 2}-of-00002.bin" for index, name in enumerate(names)}
    for shard in set(placed.values()):
        torch.save({name: state[name] for name in names if placed[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.mark.parametrize("how", ["zip", "before 1.6", "ordered", "shards"])
def test_pickled_weights_of_a_folder_are_read_as_weights_only(folder: Path, model: Any, how: str) -> None:
    state = model.state_dict()
    if how == "shards":
        save_shards(state, folder)
    else:
        made = OrderedDict(state) if how == "ordered" else dict(state)
        torch.save(made, folder / "pytorch_model.bin", _use_new_zipfile_serialization=how != "before 1.6")
    assert identify(folder).kind == "huggingface"
    loaded = opened(folder)
    assert_is(loaded, model)
    said = [str(finding.value) for finding in loaded.findings if finding.what == "checkpoint"]
    assert said == [
        f"{'2 shards' if how == 'shards' else 'pytorch_model.bin'}: a pickle, read as weights only"
    ]


def test_safetensors_are_preferred_over_pickled_weights(folder: Path, model: Any) -> None:
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    assert_is(opened(folder), model)


def test_an_index_file_as_source_means_its_folder(folder: Path, model: Any) -> None:
    save_shards(model.state_dict(), folder)
    assert_is(opened(folder / INDEX), model)
    for path in folder.glob("pytorch_model*"):
        path.unlink()
    model.save_pretrained(folder, max_shard_size="6KB")
    index = folder / "model.safetensors.index.json"
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert_is(opened(index), model)
    (folder / "config.json").unlink()
    assert identify(index).kind == "safetensors"  # with --model, the shards together
    with pytest.raises(UsageError, match="weights without the model's code.*--model"):
        opened(index)


def test_a_file_of_a_folder_asks_for_the_folder(folder: Path, model: Any) -> None:
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()}, folder / "model.safetensors"
    )
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    for name in ("model.safetensors", "pytorch_model.bin"):
        with pytest.raises(UsageError, match=f"a part of a Hugging Face folder: give that, {folder}"):
            opened(folder / name)
    with pytest.raises(SourceError, match=f"configuration of a model.*Give the folder it lies in: {folder}"):
        opened(folder / "config.json")


@pytest.mark.parametrize("sharded", [False, True])
def test_code_in_pickled_weights_is_refused_and_not_run(folder: Path, sharded: bool) -> None:
    marker, name = folder / "ran", "pytorch_model.bin"
    torch.save({"a": torch.ones(2), "b": Payload(marker)}, folder / name)
    if sharded:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    for trust in (False, True):
        with pytest.raises(UnsafeSourceError, match=r"it is code: .*system.*save_pretrained"):
            load(Plan(source=str(folder), data="random", trust_code=trust))
    assert not marker.exists()


WRONG: dict[str, tuple[Any, str]] = {
    "no weight map": ({}, "expected an index with 'weight_map'"),
    "a list": ([1], "expected an index with 'weight_map'"),
    "outside": ({"weight_map": {"a": "../pytorch_model.bin"}}, "a shard '../pytorch_model.bin' that is not beside"),
    "gone": ({"weight_map": {"a": "pytorch_model-2.bin"}}, "a shard 'pytorch_model-2.bin' that is not beside it"),
    "promised": ({"weight_map": {"b": "pytorch_model.bin"}}, "promises 'b', which is in no shard"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_index_of_pickles_is_refused(folder: Path, case: str) -> None:
    content, sentence = WRONG[case]
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(InferError, match=sentence) as caught:
        load(Plan(source=str(folder), data="random"))
    assert caught.value.exit_code == 3
