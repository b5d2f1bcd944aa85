"""JSON schemas of the answers of /predict that are no labels, with the names of Hugging Face's inference API."""

from __future__ import annotations

import msgspec


class GeneratedText(msgspec.Struct):
    """A text about an image, as Hugging Face's image-to-text task names it."""

    generated_text: str


class Entity(msgspec.Struct, omit_defaults=True):
    """An entity of a text (`entity_group`), or the label of a token (`entity`) at `index` of the tokens.

    `start`, `end`: characters of the text.
    """

    score: float
    word: str
    start: int
    end: int
    entity_group: str | None = None
    entity: str | None = None
    index: int | None = None


class AnswerSpan(msgspec.Struct):
    """A part of a context that answers a question; `start`, `end`: its characters."""

    answer: str
    score: float
    start: int
    end: int


class FilledToken(msgspec.Struct):
    """A token in place of a mask, and the text with it."""

    score: float
    token: int
    token_str: str
    sequence: str


# Answers of one input or of a batch; a text of several masks has a list for each of them.
ANSWERS = (
    list[GeneratedText | list[GeneratedText]],
    list[Entity | list[Entity]],
    AnswerSpan,
    list[AnswerSpan],
    list[FilledToken | list[FilledToken | list[FilledToken]]],
)
