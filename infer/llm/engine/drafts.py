"""Drafts of sequences: who makes them, and what follows where that fails."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from .requests import Request
from .sequence import Sequence, Speculator
from .stop_conditions import FAILURES


class Speculation(Protocol):
    """Maker of drafts; the samples of a sequence depend on nothing but itself, so that none can be told from it."""

    def open(self, request: Request) -> Speculator | None:
        """Return the speculator of a completion, or None for no drafts."""

    def draft(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        """Return for each sequence, which has a speculator, at most `limits` tokens that may follow its own.

        None where drafting would not pay.
        """

    def would_draft(self, sequence: Sequence, limit: int) -> bool:
        """Return True if the step after the one under way is to verify a draft of the sequence."""

    def measured(self, tokens: int, sequences: int, seconds: float) -> None:
        """Report the seconds of a step without prefill: `tokens` (drafts included) of `sequences` sequences."""


def draft(speculation: Speculation, sequences: Many[Sequence], limits: Many[int]) -> None:
    """Draft for sequences that have a speculator; one for which that fails goes on without drafts."""
    try:
        drafts = speculation.draft(sequences, limits)
    except FAILURES:
        if len(sequences) == 1:
            sequences[0].speculator = None
            return
        for sequence, limit in zip(sequences, limits, strict=True):
            draft(speculation, [sequence], [limit])
        return
    for sequence, limit, tokens in zip(sequences, limits, drafts, strict=True):
        sequence.draft_tokens = tokens[:limit]


def would_draft(speculation: Speculation, sequence: Sequence, limit: int) -> bool:
    """Return True if a draft is worth waiting for; a sequence for which that fails goes on without drafts."""
    if sequence.speculator is None:
        return False
    try:
        return speculation.would_draft(sequence, limit)
    except FAILURES:
        sequence.speculator = None
        return False
