"""Pairs of texts: token types tell the first from the second, as a cross-encoder needs; no images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infer import Plan, Predictor, optimize
from infer.errors import InputError, UsageError
from infer.load import load

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
WORDS = "the cat sat on a mat who is where dog ran far away and it was not there at all".split()  # noqa: SIM905
PAIRS = [
    ("who sat on the mat", "the cat sat on the mat"),
    ("where is it", "far away"),
    ("a dog", "a dog ran"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random BERT cross-encoder with one score and a WordPiece tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("pairs") / "cross"
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        num_labels=1,
    )
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(path)
    return path


def transformers_scores(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of PAIRS with the token types of the tokenizer, and with zeros."""
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = PreTrainedTokenizerFast.from_pretrained(folder)(
        PAIRS, padding=True, return_tensors="pt", return_token_type_ids=True
    )
    named = {name: rows[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        right = model(**named, token_type_ids=rows["token_type_ids"]).logits
        zeros = model(**named, token_type_ids=torch.zeros_like(rows["input_ids"])).logits
    return right.numpy(), zeros.numpy()


def test_a_cross_encoder_scores_pairs_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "data.txt"
    text.write_text("\n\n".join(part for pair in PAIRS for part in pair))
    plan = Plan(source=str(folder), backend="eager", batches=(), data=str(text))
    artifact = optimize(plan, tmp_path / "cross.infer")
    right, zeros = transformers_scores(folder)
    assert np.abs(right - zeros).max() > 1e-2  # the token types matter
    with Predictor.load(artifact.path) as predictor:
        rows = predictor.tokenize(PAIRS)
        assert set(rows["token_type_ids"].flat) == {0, 1}
        np.testing.assert_allclose(predictor.predict(rows)["logits"], right, atol=1e-5)
        single = predictor.tokenize(["the cat", "a dog ran"])
        assert not single["token_type_ids"].any()


def test_samples_of_a_pair_classifier_hold_pairs_and_single_texts(folder: Path, tmp_path: Path) -> None:
    from infer.load.samples.text_samples import tokenize

    rows = tokenize(
        ["\n\n".join(part for pair in PAIRS for part in pair)], load(Plan(source=str(folder), data="random"))
    )
    pairs = rows["token_type_ids"].any(1).tolist()
    assert True in pairs
    assert False in pairs


@pytest.mark.parametrize("row", [("a", 1), ("a", "b", "c"), {"a": "b"}])
def test_inputs_that_are_not_text_pairs_are_refused(folder: Path, row: Any) -> None:
    from infer.llm.text.tokenizer import Tokenizer

    with pytest.raises(InputError, match="expected text, got"):
        Tokenizer(folder / "tokenizer.json", max_length=16).batch([row])


def test_pairs_are_scored_and_documents_ranked(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    from tests.load.test_sentence_transformers import SMALL, tokenizer

    config = BertConfig(**SMALL, num_labels=1)
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(400)  # logits above 17 have one sigmoid in float32, and keep their order
    model.save_pretrained(tmp_path / "m")
    tokenizer().save_pretrained(tmp_path / "m")
    data = tmp_path / "data.txt"
    data.write_text("\n\n".join(["the of and", "a to in", "is you that"]))
    plan = Plan(source=str(tmp_path / "m"), backend="eager", batches=(), data=str(data))
    artifact = optimize(plan, tmp_path / "pairs.infer")
    documents = ["the of", "and a to in is", "you", "that it he was", "of of"]
    theirs = CrossEncoder(str(tmp_path / "m"), device="cpu")
    pairs = [("it was", document) for document in documents]
    raw = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    with Predictor.load(artifact.path) as predictor:
        np.testing.assert_allclose(predictor.score_pairs(pairs, raw=True), raw, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(predictor.score_pairs(pairs), theirs.predict(pairs), rtol=1e-4, atol=1e-5)
        ranked = predictor.rank("it was", documents, top_n=3)
        assert [index for index, _ in ranked] == np.argsort(-raw)[:3].tolist()
        with pytest.raises(UsageError, match="not an embedding model"):
            predictor.embed(["the"])
