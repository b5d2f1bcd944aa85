"""Drafts of a sequence, and the errors that its inputs may cause."""

from __future__ import annotations

from ...errors import InferError
from .sequence import Sequence

# Errors that the inputs of a step may cause; any other is a bug and ends the loop.
FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, InferError)


def draft(sequence: Sequence, limit: int) -> list[int]:
    """Return at most `limit` tokens that may follow; a sequence whose speculator fails goes on without drafts."""
    if sequence.speculator is None or limit < 1:
        return []
    try:
        return list(sequence.speculator.draft(sequence.tokens, limit))[:limit]
    except FAILURES:
        sequence.speculator = None
        return []
