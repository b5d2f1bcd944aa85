"""Rules of Whisper's decoder (Radford et al., 2022) on logits: suppressed tokens, and timestamps in order."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class TranscriptionRules(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a transcript may not have.

    `suppressed`: never; `suppressed_first`: not as its first token; `only`: if not empty, nothing else, as for the
    language of a sound. With `timestamps`, tokens from `first_timestamp` on come in pairs and never decrease, the first
    token is one of them, at most `last_initial` after the first, and one is taken where all timestamps together are
    more probable than any text. `end` is the token that ends a transcript; texts have smaller numbers.
    """

    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    only: tuple[int, ...] = ()
    timestamps: bool = False
    first_timestamp: int = 0
    last_initial: int | None = None
    end: int = 0

    def apply(self, logits: np.ndarray, output: Sequence[int]) -> None:
        """Set the logits of tokens that may not follow `output`, the tokens so far without the prompt, to -inf.

        `logits`: float32 [vocab], changed in place.
        """
        if self.only:
            kept = logits[list(self.only)]
            logits[:] = -np.inf
            logits[list(self.only)] = kept
        if not output:
            logits[list(self.suppressed_first)] = -np.inf
        logits[list(self.suppressed)] = -np.inf
        if self.timestamps:
            self._order(logits, output)
            self._prefer(logits)

    def _order(self, logits: np.ndarray, output: Sequence[int]) -> None:
        first = self.first_timestamp
        logits[first - 1] = -np.inf  # <|notimestamps|>
        after_one = bool(output) and output[-1] >= first
        pair = len(output) < 2 or output[-2] >= first
        if after_one and pair:
            logits[first:] = -np.inf
        elif after_one:
            logits[: self.end] = -np.inf
        last = next((token for token in reversed(output) if token >= first), None)
        if last is not None:
            logits[first : last if after_one and not pair else last + 1] = -np.inf
        if not output:
            logits[:first] = -np.inf
            if self.last_initial is not None:
                logits[first + self.last_initial + 1 :] = -np.inf

    def _prefer(self, logits: np.ndarray) -> None:
        """Leave timestamps alone where together they are more probable than each text token."""
        times = logits[self.first_timestamp :].astype(np.float64)
        top = times.max(initial=-np.inf)
        if np.isfinite(top):
            together = top + np.log(np.exp(times - top).sum())
            if together > logits[: self.first_timestamp].max():
                logits[: self.first_timestamp] = -np.inf
