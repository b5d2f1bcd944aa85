"""Token sequences with the tokens that are trained, read from text files, folders, JSON lines and chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError, SourceError, UsageError
from ...llm.text.chat_template import ChatTemplate
from ...llm.text.tokenizer import LLMTokenizer, check_text
from ...regular_files import read_regular

MAX_FILE = 1 << 32  # bytes of one file of data
TEXT_FILES = (".txt", ".md", ".rst", ".text")
LINES = (".jsonl", ".ndjson")
KEYS = "messages, prompt and completion, or text"


@dataclass(frozen=True)
class TextData:
    """Documents of a data source, each as its sequences; a document is never on both sides of a split."""

    documents: list[list[TokenSequence]]
    kind: str  # "chat" or "text"
    cut: int  # sequences that were longer than a row

    @property
    def sequences(self) -> list[TokenSequence]:
        return [sequence for document in self.documents for sequence in document]


def read_text_data(
    path: Path, tokenizer: LLMTokenizer, template: ChatTemplate | None, length: int, end: int | None
) -> TextData:
    """Read a text file, JSON lines, or a folder of both, in the order of names.

    A line has `messages` (a chat; answers of the assistant are trained), `prompt` and `completion` (the completion is),
    or `text`. Text is cut into sequences of at most `length` tokens, a longer chat at its end. `end`: token after
    each text. Raises `SourceError` that names file and line.
    """
    documents: list[list[TokenSequence]] = []
    kinds = set()
    cut = 0
    for file in _files(path):
        for value, where in _values(file):
            try:
                kind, made = _sequences(value, tokenizer, template, end)
            except InputError as error:
                raise SourceError(error.message, where=f"{where}: {error.where}", hint=error.hint) from error
            kinds.add(kind)
            if kind == "chat":
                cut += sum(len(one.ids) > length for one in made)
                pieces = [one.first(length) for one in made]
            else:
                pieces = [piece for one in made for piece in one.pieces(length)]
            pieces = [piece for piece in pieces if any(piece.trained[1:])]
            if pieces:
                documents.append(pieces)
    if not documents:
        raise SourceError("expected text to train on, found no token of any", where=str(path))
    return TextData(documents, "chat" if "chat" in kinds else "text", cut)


def split_documents(
    data: TextData, share: float, seed: int
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Split into training and held-out sequences by documents; of few documents by their last sequences.

    Both sides are non-empty where `share` is above 0 and there are two sequences.
    """
    from .rows import shuffled

    if not share:
        return data.sequences, []
    if len(data.documents) >= 20:
        order = shuffled(len(data.documents), seed, -1)
        count = max(1, round(share * len(order)))
        kept = sorted(order[count:])
        aside = sorted(order[:count])
        return (
            [one for number in kept for one in data.documents[number]],
            [one for number in aside for one in data.documents[number]],
        )
    every = data.sequences
    count = min(max(1, round(share * len(every))), len(every) - 1)
    return every[: len(every) - count], every[len(every) - count :]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no file or folder {path}", where="--data")
    known = (*TEXT_FILES, *LINES)
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in known and file.is_file())
    if not found:
        raise SourceError(f"expected files of {', '.join(known)}", where=str(path))
    return found


def _values(file: Path) -> Iterator[tuple[Any, str]]:
    """Yield the objects of JSON lines, or the text of a file, each with its place."""
    try:
        text = read_regular(file, MAX_FILE).decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"expected UTF-8 text: {error}", where=str(file)) from error
    if file.suffix.lower() not in LINES:
        yield {"text": text}, str(file)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"expected a JSON object: {error}", where=where) from error
        if not isinstance(value, dict):
            raise SourceError(f"expected a JSON object, got {type(value).__name__}", where=where)
        yield value, where


def _sequences(
    value: Mapping[str, Any], tokenizer: LLMTokenizer, template: ChatTemplate | None, end: int | None
) -> tuple[str, Sequence[TokenSequence]]:
    if "messages" in value:
        if template is None:
            raise UsageError("the model has no chat template, so it takes no messages", where="--data")
        return "chat", chat_sequences(value["messages"], value.get("tools"), tokenizer, template)
    if "prompt" in value and "completion" in value:
        return "chat", [prompt_sequence(value["prompt"], value["completion"], tokenizer, end)]
    if "text" in value:
        ids = tokenizer.encode(value["text"]) + ([] if end is None else [end])
        return "text", [TokenSequence(ids, [True] * len(ids))]
    raise InputError(
        f"expected {KEYS}, got {', '.join(map(str, list(value)[:8])) or 'nothing'}", where="line"
    )


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, and for each whether it is predicted in training."""

    ids: list[int]
    trained: list[bool]

    def first(self, length: int) -> TokenSequence:
        """Return at most the first `length` tokens."""
        return self if len(self.ids) <= length else TokenSequence(self.ids[:length], self.trained[:length])

    def pieces(self, length: int) -> list[TokenSequence]:
        """Cut into pieces of at most `length` tokens; each begins with the last token of the one before.

        The shared token gives the first one after the cut something to be predicted from.
        """
        if len(self.ids) <= length:
            return [self]
        starts = range(0, len(self.ids) - 1, length - 1)
        return [TokenSequence(self.ids[s : s + length], self.trained[s : s + length]) for s in starts]


def chat_sequences(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tokenizer: LLMTokenizer,
    template: ChatTemplate,
) -> list[TokenSequence]:
    """Return a chat as one sequence whose answers are trained, from after the generation prompt to the answer's end.

    Some templates show an answer otherwise once another message follows it (reasoning is dropped); then each answer
    becomes a sequence of its own, as the model will see it. Raises `InputError` for a chat without answer.
    """
    if not isinstance(messages, list) or not messages:
        raise InputError("expected a list of messages", where="messages")
    answers = [
        i for i, one in enumerate(messages) if isinstance(one, Mapping) and one.get("role") == "assistant"
    ]
    if not answers:
        template.render(messages, tools=tools, add_generation_prompt=False)  # a wrong role is said first
        raise InputError("expected a message of the assistant to train on, got none", where="messages")
    turns = [_turn(messages[: index + 1], tools, template) for index in answers]
    whole = turns[-1][0]
    if all(whole.startswith(text) for text, _ in turns):
        spans = [(start, len(text)) for text, start in turns]
        return [_encoded(whole, spans, tokenizer)]
    return [_encoded(text, [(start, len(text))], tokenizer) for text, start in turns]


def prompt_sequence(prompt: str, completion: str, tokenizer: LLMTokenizer, end: int | None) -> TokenSequence:
    """Return a prompt and its completion, which alone is trained, as one sequence."""
    check_text(prompt, "prompt")
    check_text(completion, "completion")
    before = tokenizer.encode(prompt)
    after = tokenizer.encode(completion, special=False) + ([] if end is None else [end])
    return TokenSequence(before + after, [False] * len(before) + [True] * len(after))


def _turn(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template: ChatTemplate
) -> tuple[str, int]:
    """Return the text up to an answer's end, and the place of the character where the answer begins."""
    text = template.render(messages, tools=tools, add_generation_prompt=False)
    before = messages[:-1]
    prompt = template.render(before, tools=tools) if before else ""
    if not text.startswith(prompt):  # the generation prompt opens what the shown answer leaves out
        prompt = template.render(before, tools=tools, add_generation_prompt=False) if before else ""
    if not text.startswith(prompt):
        raise InputError(
            "the chat template shows earlier messages otherwise once an answer follows", where="messages"
        )
    return text, len(prompt)


def _encoded(text: str, spans: Sequence[tuple[int, int]], tokenizer: LLMTokenizer) -> TokenSequence:
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    trained = [
        any(start <= begin and stop <= end and stop > begin for start, end in spans)
        for begin, stop in encoding.offsets
    ]
    return TokenSequence(list(encoding.ids), trained)
