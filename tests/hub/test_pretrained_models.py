"""Optimum's classes over names of the Hub: what a source needs is downloaded, and an artifact is pushed and opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infer
from infer.errors import UsageError
from tests.support.local_hub import TOKEN, LocalHub
from tests.support.tiny_heads import TEXTS, bert

pytest.importorskip("optimum")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
PLAN: dict[str, Any] = {"backend": "eager", "batches": (), "allow_slower": True, "data": "random"}


def logits(model: Any, tokenizer: Any) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits)


def test_a_name_is_exported_and_its_artifact_pushed_and_opened(hub: LocalHub, tmp_path: Path) -> None:
    source = tmp_path / "source"
    original = bert(source, "SequenceClassification", num_labels=3)
    (source / "pytorch_model.bin").write_bytes(b"the same weights")
    (source / "onnx").mkdir()
    (source / "onnx/model.onnx").write_bytes(b"and again")
    hub.repository("org/classifier").commit(source, tag="v1")
    hub.repository("org/classifier", {"config.json": b"{}"})  # of a later commit
    kind, cache = infer.InferModelForSequenceClassification, {"cache_dir": str(tmp_path / "hf/hub")}
    made = kind.from_pretrained("org/classifier", export=True, revision="v1", **cache, **PLAN)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= hub.downloaded
    assert hub.downloaded.isdisjoint({"pytorch_model.bin", "onnx/model.onnx"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    np.testing.assert_allclose(logits(made, tokenizer), logits(original, tokenizer), atol=1e-4)

    made.save_pretrained(tmp_path / "saved")
    made.push_to_hub(str(tmp_path / "saved"), "org/artifact", token=TOKEN)
    opened = kind.from_pretrained("org/artifact", **cache)
    assert np.array_equal(logits(opened, tokenizer), logits(made, tokenizer))
    again = kind.from_pretrained("org/artifact", local_files_only=True, **cache)
    assert again.predictor.path == opened.predictor.path
    with infer.Predictor.load("org/artifact") as predictor:
        assert predictor.task == "classification"
    with pytest.raises(UsageError, match="this is an artifact already"):
        kind.from_pretrained("org/artifact", export=True, **cache)
