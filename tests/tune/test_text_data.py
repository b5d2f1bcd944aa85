"""Training data: only answers are trained, rows are packed without mixing, and a split is by documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from infer.errors import SourceError, UsageError
from infer.llm.text.chat_template import ChatTemplate
from infer.llm.text.tokenizer import LLMTokenizer
from infer.tune.data.packed_sequences import SequenceRows, pack, packing_fault
from infer.tune.data.text import TextData, TokenSequence, read_text_data, split_documents
from infer.tune.objectives.language import NextTokenObjective
from tests.support.llm_artifacts import bytes_as_tokens
from tests.support.tiny_decoders import build

pytestmark = pytest.mark.filterwarnings("ignore")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Answers before the last message lose what stands in brackets, as reasoning does.
FORGETS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content.split(']')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLMTokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    bytes_as_tokens(folder)
    return LLMTokenizer(folder / "tokenizer.json")


def read(
    tmp_path: Path, tokenizer: LLMTokenizer, rows: list[Any], template: str = TEMPLATE, length: int = 99
) -> TextData:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_text_data(path, tokenizer, ChatTemplate({"default": template}, {}), length, 2)


def trained_text(tokenizer: LLMTokenizer, sequence: TokenSequence) -> str:
    """Return the trained text, gaps as |."""
    pairs = zip(sequence.ids, sequence.trained, strict=True)
    return "".join(tokenizer.decode([i], skip_special=False) if kept else "|" for i, kept in pairs)


def chat(*texts: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def test_only_answers_and_their_ends_are_trained(tmp_path: Path, tokenizer: LLMTokenizer) -> None:
    data = read(tmp_path, tokenizer, [chat("hi", "yes", "ok", "no")])
    (sequence,) = data.sequences
    assert (
        tokenizer.decode(sequence.ids, skip_special=False)
        == "<user>hi</s><assistant>yes</s><user>ok</s><assistant>no</s>"
    )
    assert [part for part in trained_text(tokenizer, sequence).split("|") if part] == ["yes</s>", "no</s>"]


def test_an_answer_rendered_differently_later_is_its_own_sequence(
    tmp_path: Path, tokenizer: LLMTokenizer
) -> None:
    data = read(tmp_path, tokenizer, [chat("hi", "[why]yes", "ok", "[so]no")], FORGETS)
    texts = [tokenizer.decode(one.ids, skip_special=False) for one in data.sequences]
    assert texts == [
        "<user>hi</s><assistant>[why]yes</s>",
        "<user>hi</s><assistant>yes</s><user>ok</s><assistant>[so]no</s>",
    ]
    assert [trained_text(tokenizer, one).strip("|") for one in data.sequences] == [
        "[why]yes</s>",
        "[so]no</s>",
    ]


def test_a_completion_is_trained_and_a_text_wholly(tmp_path: Path, tokenizer: LLMTokenizer) -> None:
    data = read(tmp_path, tokenizer, [{"prompt": "1+1=", "completion": "2"}, {"text": "abc"}])
    assert [trained_text(tokenizer, one) for one in data.sequences] == ["||||2</s>", "abc</s>"]


def test_a_long_text_is_cut_so_that_every_token_is_predicted_once(
    tmp_path: Path, tokenizer: LLMTokenizer
) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    data = read(tmp_path, tokenizer, [{"text": text}], length=8)
    assert all(len(one.ids) <= 8 for one in data.sequences)
    predicted = "".join(tokenizer.decode(one.ids[1:], skip_special=False) for one in data.sequences)
    assert predicted == text[1:] + "</s>"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", r"rows.jsonl:2"),
        ("[1]", r"expected a JSON object, got list - at .*:2"),
        ({"body": "x"}, "expected messages, prompt and completion, or text, got body"),
        ({"messages": [{"role": "user", "content": "x"}]}, "expected a message of the assistant"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "expected a role of"),
        ({"messages": "x"}, "expected a list of messages"),
        ({"text": 5}, "expected text, got int"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, tokenizer: LLMTokenizer, row: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        read(tmp_path, tokenizer, [{"text": "fine"}, row])


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path, tokenizer: LLMTokenizer) -> None:
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    data = read_text_data(tmp_path, tokenizer, None, 99, None)
    assert [tokenizer.decode(one.ids) for one in data.sequences] == ["first", "second"]
    (tmp_path / "d.jsonl").write_text(json.dumps(chat("a", "b")))
    with pytest.raises(UsageError, match="no chat template"):
        read_text_data(tmp_path, tokenizer, None, 99, None)


@pytest.mark.parametrize("count", [2, 7, 40])
def test_a_split_is_by_documents_and_repeats_itself(count: int) -> None:
    documents = [
        [TokenSequence([number, part], [True, True]) for part in range(2)] for number in range(count)
    ]
    data = TextData(documents, "text", 0)
    kept, aside = split_documents(data, 0.1, seed=3)
    assert (kept, aside) == split_documents(data, 0.1, seed=3)
    assert len(kept) + len(aside) == 2 * count
    assert kept
    assert aside
    if count >= 20:
        assert not {one.ids[0] for one in kept} & {one.ids[0] for one in aside}
    assert split_documents(data, 0.0, seed=3)[1] == []


def test_bins_hold_every_sequence_once_within_capacity() -> None:
    lengths = torch.randint(1, 65, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    bins = pack(lengths, 64)
    assert sorted(index for group in bins for index in group) == list(range(200))
    assert all(sum(lengths[index] for index in group) <= 64 for group in bins)
    assert len(bins) <= 1.1 * sum(lengths) / 64 + 1


def sequences(count: int = 6) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(3, 14, (count,), generator=generator).tolist()
    return [
        TokenSequence(
            torch.randint(3, 300, (size,), generator=generator).tolist(), [False, *[True] * (size - 1)]
        )
        for size in sizes
    ]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "gemma3_text"])
def test_packed_rows_give_the_loss_and_gradient_of_unpacked_ones(name: str) -> None:
    found = []
    for packed in (True, False):
        model = build(name)
        assert packing_fault(model, 300) is None
        objective = NextTokenObjective(model, model)
        rows = SequenceRows(sequences(), 32, 0, packed=packed)
        loss, terms = objective.loss(rows.batch(range(len(rows))))
        loss.backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        found.append((len(rows), float(loss), int(terms), gradient))
    (bins, one, count, first), (alone, two, same, second) = found
    assert bins < alone
    assert count == same == sum(len(each.ids) - 1 for each in sequences())
    assert one == pytest.approx(two, rel=1e-4)
    assert float((first - second).norm()) <= 1e-3 * float(second.norm())


def test_a_model_that_mixes_packed_sequences_is_found_out() -> None:
    assert "takes no position_ids" in str(packing_fault(build("bloom"), 300))
