"""Late-interaction models (ColBERT) give the vectors and the scores that sentence-transformers gives."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from infer import Plan, Predictor, optimize
from infer.errors import InputError, UsageError
from tests.support.fake_predictors import live

WORDS = [*"abcdefghijklmnopqrstuvwxyz", *string.punctuation, "rain", "##fall", "the", "in", "spain", "stays"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
QUERY = "rain in spain?"
DOCUMENTS = ["the rain, in spain", "a b c", "rainfall stays in the rain in spain . . and more of it " * 3]
WIDTH = 16


def bert(folder: Path) -> None:
    """Save a tiny BERT with a WordPiece tokenizer whose words are known."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)


def stanford(folder: Path) -> Path:
    """Save a checkpoint as Stanford's ColBERT does: projection beside the encoder, settings in artifact.metadata."""
    bert(folder)
    tensors = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors["linear.weight"] = torch.randn(WIDTH, 32) * 0.2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    said = {"query_maxlen": 12, "doc_maxlen": 24, "attend_to_mask_tokens": False, "mask_punctuation": True}
    (folder / "artifact.metadata").write_text(json.dumps(said))
    return folder


def pylate(folder: Path) -> Path:
    """Save a folder as PyLate does: a Dense of its own, prefixes and expansion that others attend to."""
    bert(folder)
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": torch.randn(WIDTH, 32) * 0.2}, folder / "1_Dense/model.safetensors")
    dense = {"in_features": 32, "out_features": WIDTH, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"  # type: ignore[assignment]
    (folder / "1_Dense/config.json").write_text(json.dumps(dense))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    said = {
        "model_type": "ColBERT", "query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 10,
        "document_length": 20, "attend_to_expansion_tokens": True, "skiplist_words": [",", "."],
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    return folder


def native(folder: Path) -> Path:
    """Save a folder as sentence-transformers 6 does, without expansion, prompts as text."""
    st = pytest.importorskip("sentence_transformers")
    model: Any = st.MultiVectorEncoder(str(pylate(folder.parent / "of")))
    model[0].query_expansion = None
    model.prompts = {"query": "the ", "document": ""}
    model.save(str(folder))
    return folder


KINDS = {"stanford": stanford, "pylate": pylate, "native": native}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("late")
    found = {}
    for name, save in KINDS.items():
        (folder / name).mkdir()
        plan = Plan(
            source=str(save(folder / name)), backend="eager", data="random", batches=(), allow_slower=True
        )
        found[name] = optimize(plan, folder / f"{name}.infer").path
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_vectors_and_scores_equal_sentence_transformers(name: str, made: dict[str, Path]) -> None:
    st = pytest.importorskip("sentence_transformers")
    model: Any = st.MultiVectorEncoder(str(made[name].with_suffix("")), device="cpu")
    wanted = model.encode_query([QUERY], convert_to_numpy=True)
    documents = model.encode_document(DOCUMENTS, convert_to_numpy=True)
    scores = model.similarity(wanted, documents)[0].numpy()
    with Predictor.load(made[name]) as predictor:
        found = predictor.embed_tokens([QUERY], role="query") + predictor.embed_tokens(DOCUMENTS)
        for ours, theirs in zip(found, [*wanted, *documents], strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, atol=2e-6)
        ranked = predictor.rank(QUERY, DOCUMENTS)
        assert [index for index, _ in ranked] == np.argsort(-scores).tolist()
        np.testing.assert_allclose([score for _, score in ranked], np.sort(scores)[::-1], rtol=1e-5)


def test_late_interaction_answers_at_embeddings_rerank_and_score(made: dict[str, Path]) -> None:
    with Predictor.load(made["stanford"]) as predictor:
        ranked = predictor.rank(QUERY, DOCUMENTS)
        [vectors] = predictor.embed_tokens([QUERY], role="query")
        with live(predictor) as server, httpx.Client(base_url=server.url, timeout=30) as client:
            body = {"query": QUERY, "documents": DOCUMENTS}
            results = client.post("/v1/rerank", json=body).json()["results"]
            assert [one["index"] for one in results] == [index for index, _ in ranked]
            got = [one["relevance_score"] for one in results]
            np.testing.assert_allclose(got, [score for _, score in ranked], rtol=1e-5)
            score = client.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS[0]}).json()["data"][0][
                "score"
            ]
            assert score == pytest.approx(dict(ranked)[0], rel=1e-5)
            asked = {"model": predictor.name, "input": [QUERY], "input_type": "query"}
            answer = client.post("/v1/embeddings", json=asked).json()
            np.testing.assert_allclose(answer["data"][0]["embeddings"], vectors, atol=1e-5)
            wrong = client.post("/v1/embeddings", json={**asked, "input_type": "image"})
            assert wrong.status_code == 400
            assert "search_query" in wrong.text
            schema = client.get("/openapi.json").json()["components"]["schemas"]
            assert {"MultiVectorEmbeddings", "GeneratedText", "AnswerSpan", "Entity", "FilledToken"} <= set(
                schema
            )


def test_a_late_interaction_model_refuses_what_it_has_not(made: dict[str, Path]) -> None:
    with Predictor.load(made["pylate"]) as predictor:
        with pytest.raises(UsageError, match="not an embedding model"):
            predictor.embed([QUERY])
        with pytest.raises(InputError, match="expected one of query, document"):
            predictor.embed_tokens([QUERY], role="image")
        assert set(predictor.answer(QUERY)) == {"embeddings"}
