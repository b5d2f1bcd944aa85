"""/predict of entities and of answers to questions, as Hugging Face's clients ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")

from infer.llm.text.tokenizer import Tokenizer  # noqa: E402
from infer.serve.fork_server.client import ForkServer  # noqa: E402
from infer.serve.fork_server.messages import ForkServerConfig, SpanRow  # noqa: E402
from infer.serve.llm.tokenizer_pool import ForkedTokenizer  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402
from tests.support.fake_predictors import Arrays, Fake, live  # noqa: E402

WORDS = "Ada Lovelace lived in London and wrote to Charles Babbage".split()  # noqa: SIM905
LABELS = ["O", "B-PER", "I-PER", "B-LOC"]
KINDS = {"Ada": 1, "Lovelace": 2, "London": 3, "Charles": 1, "Babbage": 2}
TEXT = "Ada Lovelace lived in London"


def save_tokenizer(folder: Path) -> Path:
    """Save a tokenizer of words with [CLS] and [SEP]."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(folder / "tokenizer.json"))
    return folder


def of_words(folder: Path, name: str, task: str, outputs: tuple[TensorSpec, ...], run: object) -> Fake:
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = tuple(TensorSpec(n, "int64", ("batch", "seq")) for n in names)
    fake = Fake(
        name, inputs, outputs, run, sizes={"seq": (1, 24)}, task=task, padding=dict.fromkeys(names, 0)
    )  # type: ignore[arg-type]
    fake.manifest.meta.update({"labels": LABELS})
    fake.tokenizer = Tokenizer(save_tokenizer(folder) / "tokenizer.json", max_length=24)  # type: ignore[attr-defined]
    return fake


def tagger(folder: Path) -> Fake:
    """Token classifier that knows the names among WORDS."""
    kinds = np.array([0] * 4 + [KINDS.get(word, 0) for word in WORDS])
    run = lambda inputs: {"logits": (np.eye(4) * 6)[kinds[inputs["input_ids"]]].astype(np.float32)}  # noqa: E731
    output = TensorSpec("logits", "float32", ("batch", "seq", 4))
    return of_words(folder, "tagger", "token-classification", (output,), run)


def answerer(folder: Path) -> Fake:
    """Question answering model that answers "Charles Babbage" to everything."""

    def run(inputs: Arrays) -> Arrays:
        context = inputs["token_type_ids"] * 8.0
        places = {"start_logits": 4 + WORDS.index("Charles"), "end_logits": 4 + WORDS.index("Babbage")}
        return {
            name: ((inputs["input_ids"] == token) * context).astype(np.float32)
            for name, token in places.items()
        }

    outputs = tuple(TensorSpec(n, "float32", ("batch", "seq")) for n in ("start_logits", "end_logits"))
    return of_words(folder, "answerer", "question-answering", outputs, run)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("words")
    with live(tagger(folder), answerer(folder)) as server:
        yield server.url


def ask(url: str, model: str, inputs: object) -> httpx.Response:
    return httpx.post(f"{url}/predict", json={"model": model, "inputs": inputs}, timeout=60)


def test_entities_have_their_place_in_the_text(url: str) -> None:
    found = ask(url, "tagger", TEXT).json()
    assert [(one["entity_group"], one["word"]) for one in found] == [
        ("PER", "Ada Lovelace"),
        ("LOC", "London"),
    ]
    assert [TEXT[one["start"] : one["end"]] for one in found] == ["Ada Lovelace", "London"]
    assert all(0.9 < one["score"] < 1 for one in found)
    both = ask(url, "tagger", [TEXT, "and to"]).json()
    assert [one["word"] for one in both[0]] == ["Ada Lovelace", "London"]
    assert both[1] == []


def test_a_question_has_its_answer_in_a_long_context(url: str) -> None:
    context = "and to London " * 12 + "Ada wrote to Charles Babbage in London"
    found = ask(url, "answerer", {"question": "Ada wrote to", "context": context}).json()
    assert set(found) == {"answer", "score", "start", "end"}
    assert found["answer"] == "Charles Babbage" == context[found["start"] : found["end"]]
    assert 0.9 < found["score"] <= 1


def test_the_inference_client_of_hugging_face_reads_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with live(tagger(tmp_path)) as server:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=60)
        assert [one.word for one in client.token_classification(TEXT)] == ["Ada Lovelace", "London"]
    with live(answerer(tmp_path)) as server:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=60)
        found = client.question_answering(question="and", context="Ada wrote to Charles Babbage")
        assert (found.answer, found.end) == ("Charles Babbage", 28)


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        ("answerer", TEXT, "expected an object with question and context"),
        ("tagger", {"question": "a", "context": "b"}, "expected a text, or a list of texts"),
        ("tagger", [["a", "b"]], "expected a text, or a list of texts"),
        ("tagger", [], "expected 1 to 1024 texts, got 0"),
        ("answerer", {"question": "in " * 40, "context": "Ada"}, "the question takes all of the 24 tokens"),
    ],
)
def test_inputs_of_another_form_are_refused(url: str, model: str, inputs: object, said: str) -> None:
    answer = ask(url, model, inputs)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]


def test_the_tokenizer_process_gives_the_same_places(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    own = Tokenizer(tmp_path / "tokenizer.json", max_length=24)
    context = "Ada wrote to Charles Babbage in London " * 8

    async def main() -> list[list[SpanRow]]:
        forks = ForkServer(ForkServerConfig(folder=str(tmp_path), max_length=24), "model")
        texts = ForkedTokenizer(forks)
        try:
            plain = await texts.encode_spans([TEXT, "and"], None, "inputs")
            return [plain, await texts.encode_spans([context], "Ada wrote to", "inputs")]
        finally:
            texts.close()
            forks.close()

    plain, windows = asyncio.run(main())
    assert plain == [SpanRow.of(one) for one in own.encodings([TEXT, "and"])]
    assert windows == [SpanRow.of(one) for one in own.span_encodings([context], "Ada wrote to")]
    assert len(windows) > 1
