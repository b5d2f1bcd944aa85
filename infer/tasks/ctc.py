"""Text of CTC outputs (Graves et al., 2006): the best token of each frame, repeats and blanks dropped, with times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArtifactError, UsageError
from ..regular_files import MAX_JSON, read_regular


class Frames(NamedTuple):
    """The best token of each frame, int64 [frames], and its log probability, float64 [frames]."""

    ids: np.ndarray
    logprobs: np.ndarray


class Token(NamedTuple):
    """A token of a text: its number, its frames from `start` to before `end`, and its log probability."""

    id: int
    start: int
    end: int
    logprob: float


class Word(NamedTuple):
    """A word with its frames from `start` to before `end`, and its tokens."""

    text: str
    start: int
    end: int
    tokens: tuple[Token, ...]


class CTCDecoder:
    """Decoder of logits [frames, tokens] by a vocabulary; `delimiter` is the token between words."""

    def __init__(self, vocabulary: Mapping[str, int], blank: int, delimiter: str = "|") -> None:
        self.names = {number: token for token, number in vocabulary.items()}
        self.blank, self.delimiter = blank, delimiter

    @classmethod
    def open(cls, folder: Path | None, meta: Mapping[str, Any], name: str) -> CTCDecoder:
        """Read vocab.json of an artifact; raise `UsageError` where it is missing or not an object of integers."""
        path = None if folder is None else folder / "vocab.json"
        if path is None or not path.is_file():
            raise UsageError(f"{name} holds no vocab.json: its frames have no text", hint="Give tensors")
        found = json.loads(read_regular(path, MAX_JSON, error=ArtifactError))
        if not isinstance(found, dict) or not all(isinstance(number, int) for number in found.values()):
            raise UsageError(
                f"expected the vocab.json of {name} to map tokens to ids, got another JSON value",
                hint="Give tensors",
            )
        blank = meta.get("pad_id")
        blank = found.get("<pad>", 0) if blank is None else int(blank)
        return cls(found, blank, str(meta.get("word_delimiter") or "|"))

    @staticmethod
    def frames(logits: np.ndarray) -> Frames:
        """Return the best token of each frame of logits [frames, tokens], and its log probability."""
        best = logits.argmax(-1)
        top = logits[np.arange(len(best)), best].astype(np.float64)
        return Frames(best, top - _logsumexp(logits))

    def tokens(self, frames: Frames) -> list[Token]:
        """Return the tokens of frames, without repeats and blanks, each with the log probability of its best frame."""
        best = frames.ids
        if not len(best):
            return []
        starts = np.flatnonzero(np.concatenate([[True], best[1:] != best[:-1]]))
        ends = np.concatenate([starts[1:], [len(best)]])
        return [
            Token(int(best[start]), int(start), int(end), float(frames.logprobs[start:end].max()))
            for start, end in zip(starts, ends, strict=True)
            if best[start] != self.blank
        ]

    def text(self, tokens: list[Token]) -> str:
        """Return the text of tokens, words divided by a space."""
        return self._joined(tokens).replace(self.delimiter, " ").strip()

    def words(self, tokens: list[Token]) -> list[Word]:
        """Return the words of tokens, from the frame of the first character to that of the last."""
        found, current = list[Word](), list[Token]()
        for token in [*tokens, None]:
            if token is not None and token.id != self._space:
                current.append(token)
                continue
            if text := self._joined(current):
                found.append(Word(text, current[0].start, current[-1].end, tuple(current)))
            current = []
        return found

    def _joined(self, tokens: list[Token]) -> str:
        return "".join(self.names.get(token.id, "") for token in tokens)

    @cached_property
    def _space(self) -> int | None:
        return next((number for number, token in self.names.items() if token == self.delimiter), None)


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    """Return log of the sum of exponentials over the last axis, float64 [frames]."""
    values = logits.astype(np.float64)
    top = values.max(-1)
    return top + np.log(np.exp(values - top[:, None]).sum(-1))
