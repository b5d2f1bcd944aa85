"""/predict of entities, masks, choices and answers to questions, as Hugging Face's clients ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")

from infer.llm.text.tokenizer import Tokenizer  # noqa: E402
from infer.process.fork_server import ForkServer  # noqa: E402
from infer.serve.llm.tokenizer_pool import ForkedTokenizer  # noqa: E402
from infer.serve.text_jobs.messages import TokenizerConfig  # noqa: E402
from infer.serve.text_jobs.texts import SpanRow  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402
from tests.support.fake_predictors import Arrays, Fake, live  # noqa: E402

WORDS = "Ada Lovelace lived in London and wrote to Charles Babbage".split()  # noqa: SIM905
LABELS = ["O", "B-PER", "I-PER", "B-LOC"]
KINDS = {"Ada": 1, "Lovelace": 2, "London": 3, "Charles": 1, "Babbage": 2}
TEXT = "Ada Lovelace lived in London"


def save_tokenizer(folder: Path) -> Path:
    """Save a tokenizer of words with [CLS] and [SEP]."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "[MASK]"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(folder / "tokenizer.json"))
    return folder


def of_words(folder: Path, name: str, task: str, outputs: tuple[TensorSpec, ...], run: object) -> Fake:
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = tuple(TensorSpec(n, "int64", ("batch", "seq")) for n in names)
    tokenizer = Tokenizer(save_tokenizer(folder) / "tokenizer.json", max_length=24)
    fake = Fake(
        name,
        inputs,
        outputs,
        run,  # type: ignore[arg-type]
        sizes={"seq": (1, 24)},
        task=task,
        padding=dict.fromkeys(names, 0),
        tokenizer=lambda: tokenizer,
    )
    fake.info.meta["labels"] = LABELS
    return fake


def tagger(folder: Path) -> Fake:
    """Token classifier that knows the names among WORDS."""
    kinds = np.array([0] * 4 + [KINDS.get(word, 0) for word in WORDS])
    run = lambda inputs: {"logits": (np.eye(4) * 6)[kinds[inputs["input_ids"]]].astype(np.float32)}  # noqa: E731
    output = TensorSpec("logits", "float32", ("batch", "seq", 4))
    return of_words(folder, "tagger", "token-classification", (output,), run)


def filler(folder: Path) -> Fake:
    """Masked language model that expects the words of WORDS in their order, the last the most."""
    row = np.log(np.arange(5 + len(WORDS), dtype=np.float32) + 1)
    run = lambda inputs: {"logits": np.broadcast_to(row, (*inputs["input_ids"].shape, len(row))).copy()}  # noqa: E731
    fake = of_words(
        folder, "filler", "fill-mask", (TensorSpec("logits", "float32", ("batch", "seq", len(row))),), run
    )
    fake.info.meta.update({"mask_token": "[MASK]", "pad_id": 0})
    return fake


def chooser(folder: Path) -> Fake:
    """Multiple choice model that likes long choices."""
    run = lambda inputs: {"logits": inputs["token_type_ids"].sum(1, keepdims=True).astype(np.float32)}  # noqa: E731
    return of_words(
        folder, "chooser", "multiple-choice", (TensorSpec("logits", "float32", ("batch", 1)),), run
    )


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
    with live(tagger(folder), answerer(folder), filler(folder), chooser(folder)) as server:
        yield server.url


def ask(url: str, model: str, inputs: object, **parameters: object) -> httpx.Response:
    asked = {"model": model, "inputs": inputs, "parameters": parameters}
    return httpx.post(f"{url}/predict", json=asked, timeout=60)


def test_entities_have_character_offsets(url: str) -> None:
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


def test_a_question_is_answered_from_a_long_context(url: str) -> None:
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
        both = client.question_answering(question="and", context="Ada wrote", top_k=2, max_answer_len=1)
        assert {one.answer for one in both} == {"Ada", "wrote"}
    with live(filler(tmp_path)) as server:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=60)
        best = client.fill_mask("Ada [MASK] in", top_k=2)
        assert [one.token_str for one in best] == ["[MASK]", "Babbage"]
        (only,) = client.fill_mask("Ada [MASK] in", targets=["London"])
        assert (only.token_str, only.sequence) == ("London", "Ada London in")
        assert only.score == pytest.approx(9 / sum(range(1, 16)), abs=1e-5)


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        ("answerer", TEXT, "expected an object with question and context"),
        ("tagger", {"question": "a", "context": "b"}, "expected a text, or a list of texts"),
        ("tagger", [["a", "b"]], "expected a text, or a list of texts"),
        ("tagger", [], "expected 1 to 1024 texts, got 0"),
        ("filler", ["a [MASK]", "Ada"], "expected a text with [MASK] in it - at inputs[1]"),
        (
            "answerer",
            {"question": "a", "choices": ["b", "c"]},
            "expected an object with question and context",
        ),
        (
            "chooser",
            {"question": "a", "choices": ["b"]},
            "expected an object with question and at least two choices",
        ),
        ("chooser", "Ada", "expected an object with question and at least two choices"),
        ("answerer", {"question": "in " * 40, "context": "Ada"}, "the question takes all of the 24 tokens"),
    ],
)
def test_malformed_text_span_inputs_are_refused(url: str, model: str, inputs: object, said: str) -> None:
    answer = ask(url, model, inputs)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("model", "parameters", "said"),
    [
        ("tagger", {"aggregation_strategy": "max"}, "expected one of none, simple, got 'max'"),
        (
            "tagger",
            {"top_k": 2},
            "a token-classification model has no parameter top_k; it takes aggregation_strategy",
        ),
        ("tagger", {"stride": 8}, "unknown field `stride`"),
        ("filler", {"targets": ["Paris"]}, "expected a token of the vocabulary - at parameters.targets[0]"),
        ("filler", {"top_k": 10**9}, "the filled texts have"),
        (
            "filler",
            {"threshold": 0.5},
            "a fill-mask model has no parameter threshold; it takes top_k, targets",
        ),
        ("chooser", {"function_to_apply": "none"}, "has no parameter function_to_apply; it takes top_k"),
    ],
)
def test_a_parameter_of_another_task_is_refused(url: str, model: str, parameters: dict, said: str) -> None:
    inputs = {"question": "a", "choices": ["b", "c"]} if model == "chooser" else "Ada [MASK] London"
    answer = ask(url, model, inputs, **parameters)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]


def test_multiple_choice_returns_a_probability_per_choice(url: str) -> None:
    asked = {"question": "Ada", "choices": ["London", "in London and", "wrote to"]}
    found = ask(url, "chooser", asked, top_k=2).json()
    assert [one["label"] for one in found] == ["in London and", "wrote to"]
    assert found[0]["score"] / found[1]["score"] == pytest.approx(np.e, rel=1e-5)


def test_the_tokenizer_process_gives_the_same_offsets(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    own = Tokenizer(tmp_path / "tokenizer.json", max_length=24)
    context = "Ada wrote to Charles Babbage in London " * 8

    async def main() -> list[list[SpanRow]]:
        forks = ForkServer(
            "infer.serve.text_jobs", TokenizerConfig(folder=str(tmp_path), max_length=24), "model"
        )
        texts = ForkedTokenizer(forks)
        try:
            plain = await texts.encode_spans([TEXT, "and"], None, "inputs")
            assert await texts.find_tokens(["[MASK]", "Paris"]) == [own.token_id("[MASK]"), None]
            ids = plain[0].ids
            assert await texts.decode([(ids, True), (ids, False)]) == [TEXT, f"[CLS] {TEXT} [SEP]"]
            return [plain, await texts.encode_spans([context], "Ada wrote to", "inputs")]
        finally:
            texts.close()
            forks.close()

    plain, windows = asyncio.run(main())
    assert plain == [SpanRow.of(one) for one in own.encodings([TEXT, "and"])]
    assert windows == [SpanRow.of(one) for one in own.span_encodings([context], "Ada wrote to")]
    assert len(windows) > 1
