"""Chats as token sequences in which only the answers of the assistant are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...llm.text.chat_template import ChatTemplate
from ...llm.text.tokenizer import LLMTokenizer, check_text


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
