"""Artifacts as SentenceTransformer and CrossEncoder: that library's methods give its own vectors and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infer
from infer.errors import UsageError
from tests.support.tiny_heads import SMALL, TEXTS, bert, save, save_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")
from sentence_transformers import CrossEncoder, SentenceTransformer  # noqa: E402
from sentence_transformers.base.modules import Normalize, Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and sentence-transformers have many to give
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[3]), (TEXTS[0], TEXTS[3])]


def optimized(folder: Path) -> Path:
    plan = infer.Plan(source=str(folder), backend="eager", batches=(), data="random", allow_slower=True)
    return infer.optimize(plan, folder.with_suffix(".infer")).path


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embedder") / "m"
    config = transformers.BertConfig(
        **SMALL, vocab_size=save_tokenizer(folder), max_position_embeddings=64, type_vocab_size=1
    )
    save(transformers.BertModel(config), folder)
    modules = [Transformer(str(folder)), Pooling(32), Normalize()]
    prompts = {"query": "who is ", "document": ""}
    theirs = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    theirs.save_pretrained(str(folder.with_name("sentences")))
    return optimized(folder.with_name("sentences")), theirs


def test_an_artifact_encodes_as_a_sentence_transformer(embedder: tuple[Path, Any]) -> None:
    path, theirs = embedder
    ours = infer.sentence_transformer(path)
    close(ours.encode(TEXTS, batch_size=3), theirs.encode(TEXTS, batch_size=3))
    close(ours.encode(TEXTS[0]), theirs.encode(TEXTS[0]))
    asked: dict[str, Any] = {"prompt_name": "query", "convert_to_tensor": True, "truncate_dim": 8}
    close(ours.encode(TEXTS, **asked), theirs.encode(TEXTS, **asked))
    found, expected = ours.encode_query(TEXTS[0]), theirs.encode_query(TEXTS[0])
    close(ours.similarity(found, ours.encode(TEXTS)), theirs.similarity(expected, theirs.encode(TEXTS)))
    assert ours.get_embedding_dimension() == 32
    with pytest.raises(UsageError, match="tokenizer has no options"):
        ours.encode(TEXTS, processing_kwargs={"text": {"max_length": 3}})
    with pytest.raises(UsageError, match="is a embedding model, not one of classification"):
        infer.cross_encoder(path)


def test_a_saved_sentence_transformer_opens_again(embedder: tuple[Path, Any], tmp_path: Path) -> None:
    path, theirs = embedder
    infer.sentence_transformer(path).save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    close(again.encode(TEXTS, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query"))


@pytest.mark.parametrize("labels", [1, 3])
def test_an_artifact_scores_as_a_cross_encoder(tmp_path: Path, labels: int) -> None:
    bert(tmp_path / "m", "SequenceClassification", num_labels=labels)
    theirs = CrossEncoder(str(tmp_path / "m"), device="cpu")
    theirs.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    ours = infer.cross_encoder(optimized(tmp_path / "m"))
    assert ours.num_labels == labels
    close(ours.predict(PAIRS, batch_size=2), theirs.predict(PAIRS, batch_size=2))
    plain = {"activation_fn": torch.nn.Identity()}
    close(ours.predict(PAIRS, **plain), theirs.predict(PAIRS, **plain))
    if labels == 1:
        found, expected = (one.rank(TEXTS[0], TEXTS[1:]) for one in (ours, theirs))
        assert [row["corpus_id"] for row in found] == [row["corpus_id"] for row in expected]
        close(*([float(row["score"]) for row in rows] for rows in (found, expected)))
