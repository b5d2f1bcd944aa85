"""Zero-shot classification of texts gives the scores of transformers' pipeline, in Predictor and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bench.models.checks import write_byte_tokenizer
from infer import Plan, Predictor, optimize
from infer.errors import InputError
from infer.tasks import zero_shot_text
from tests.support.fake_predictors import live

LABELS = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
TEXT, CANDIDATES = "The room was small.", ["hotel", "food", "weather"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a tiny NLI model; its source lies beside it."""
    import transformers

    folder = tmp_path_factory.mktemp("zero_shot") / "nli"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ids: Any = {"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}}
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **sizes, vocab_size=259, max_position_embeddings=128, initializer_range=0.5, **ids
    )  # type: ignore[arg-type]
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    write_byte_tokenizer(folder)
    plan = Plan(
        source=str(folder), backend="eager", batches=(), data="random", allow_slower=True, max_length=128
    )
    return optimize(plan, folder.with_suffix(".infer")).path


@pytest.fixture(scope="module")
def predictor(made: Path) -> Iterator[Predictor]:
    with Predictor.load(made) as opened:
        yield opened


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("labels", [CANDIDATES, CANDIDATES[:1]])
def test_scores_of_candidates_equal_the_pipeline(
    made: Path, predictor: Predictor, labels: list[str], multi_label: bool
) -> None:
    import transformers

    source = made.with_suffix("")
    pipeline: Any = transformers.pipeline(
        "zero-shot-classification",
        model=transformers.BertForSequenceClassification.from_pretrained(source),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(source / "tokenizer.json"), pad_token="<pad>"
        ),
    )
    pipeline.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]  # BERT's
    template = "About {}."
    theirs = pipeline(TEXT, labels, hypothesis_template=template, multi_label=multi_label)
    row = {
        "text": TEXT, "candidate_labels": labels, "hypothesis_template": template, "multi_label": multi_label,
    }  # fmt: skip
    ours = predictor.predict(row)
    assert [one["label"] for one in ours] == theirs["labels"]
    assert [one["score"] for one in ours] == pytest.approx(theirs["scores"], abs=1e-5)


def test_the_inference_client_classifies_by_candidate_labels(predictor: Predictor, monkeypatch: Any) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    want = predictor.answer({"text": TEXT, "candidate_labels": CANDIDATES})
    with live(predictor) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=30)
        found = client.zero_shot_classification(TEXT, CANDIDATES)
        assert [one.label for one in found] == [one["label"] for one in want]
        assert [one.score for one in found] == pytest.approx([one["score"] for one in want], abs=1e-4)
        body = {"inputs": [TEXT, TEXT], "parameters": {"candidate_labels": CANDIDATES, "top_k": 1}}
        both = http.post("/predict", json=body).json()
        assert [[one["label"] for one in row] for row in both] == [[want[0]["label"]]] * 2
        bad = http.post("/predict", json={"inputs": TEXT, "parameters": {"candidate_labels": []}})
        assert bad.status_code == 400
        assert "at least one text" in bad.text


def test_a_model_without_a_label_of_entailment_is_refused() -> None:
    with pytest.raises(InputError, match="begins with 'entail'; it has good, bad"):
        zero_shot_text.entailment(["good", "bad"], "inputs")
    with pytest.raises(InputError, match=r"with \{\} in it"):
        zero_shot_text.hypotheses(["a"], "no place", "inputs")
