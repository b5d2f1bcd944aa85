"""Penalties on the logits of tokens that a sequence holds already, for the whole batch, on the host and in CUDA graphs.

Tokens are counted in one number: 1 where the prompt holds the token, and 2 for each time that the output does.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

Values = Any  # numpy.ndarray or torch.Tensor: the formula is one for both


class TokenCounts:
    """Distinct tokens of prompt and output, and their counts; grows by one token at a time."""

    def __init__(self, prompt: Many[int], output: Many[int] = ()) -> None:
        tokens = list(dict.fromkeys(prompt))
        self._place = {token: i for i, token in enumerate(tokens)}
        self._tokens = np.array([*tokens, *[0] * 64], dtype=np.int64)
        self._counts = np.zeros(len(self._tokens), dtype=np.float32)
        self._counts[: len(tokens)] = 1
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += 2

    def remove(self, tokens: Many[int]) -> None:
        """Undo `add` of these tokens, the last ones added."""
        for token in reversed(tokens):
            place = self._place[token]
            self._counts[place] -= 2
            if self._counts[place] == 0:
                del self._place[token]

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int64, and their counts, float32, as they are now."""
        size = len(self._place)
        return self._tokens[:size].copy(), self._counts[:size].copy()


def penalize(logits: Values, seen: Values, repetition: Values, frequency: Values, presence: Values) -> Values:
    """Return logits after penalties, all float32; `seen`: counts. Arrays or tensors, whose shapes are broadcast.

    Repetition counts prompt and output (Keskar et al. 2019, CTRL), then frequency and presence the output alone
    (OpenAI).
    """
    known, positive, count = seen > 0, logits > 0, seen // 2
    factor = known * (positive / repetition + ~positive * repetition) + ~known
    return logits * factor - (frequency * count + presence * (count > 0))
