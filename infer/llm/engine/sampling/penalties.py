"""Counts of a sequence's tokens, and the penalties on their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sampling_options import Sampling


class TokenCounts:
    """Distinct tokens of prompt and output, and their counts in the output; grows by one token at a time."""

    def __init__(self, prompt: Sequence[int]) -> None:
        tokens = list(dict.fromkeys(prompt))
        self._place = {token: i for i, token in enumerate(tokens)}
        self._of_prompt = len(tokens)
        self._tokens = np.array([*tokens, *[0] * 64], dtype=np.int64)
        self._counts = np.zeros(len(self._tokens), dtype=np.int64)

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens, self._counts = (
                np.concatenate([x, np.zeros_like(x)]) for x in (self._tokens, self._counts)
            )
        self._tokens[place] = token
        self._counts[place] += 1

    def remove(self, tokens: Sequence[int]) -> None:
        """Undo `add` of these tokens, the last ones added."""
        for token in reversed(tokens):
            place = self._place[token]
            self._counts[place] -= 1
            if self._counts[place] == 0 and place >= self._of_prompt:
                del self._place[token]

    def apply(self, row: Any, sampling: Sampling) -> None:
        """Apply penalties to logits float32 [vocab], a tensor or an array, in place.

        Repetition counts prompt and output (Keskar et al. 2019, CTRL), then frequency and presence the output alone
        (OpenAI).
        """
        size = len(self._place)
        index: Any = self._tokens[:size]
        counts: Any = self._counts[:size].astype(np.float32)
        if isinstance(row, Tensor):
            index, counts = (torch.from_numpy(x).to(row.device) for x in (index, counts))
        values, factor = row[index], sampling.repetition_penalty
        if factor != 1:
            positive = values > 0
            values = values * (positive / factor + ~positive * factor)
        row[index] = values - (sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0))
