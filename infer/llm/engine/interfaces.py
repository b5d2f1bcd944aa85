"""Interfaces of the parts of an engine: its step, grammars with their compiler, what drafts for a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class StepRunner(Protocol):
    """A step of a language model as a backend opens it."""

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the step on the inputs of `llm.step.paged_step`: {"logits": float32 [rows, vocab]}; writes the cache."""


class Grammar(Protocol):
    """State of one completion within its grammar."""

    @property
    def finished(self) -> bool:
        """True when no token may follow: the completion ends here, without an end token."""

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Set in `bitmask[row]` the tokens that may come next, the end token where the output may end.

        int32 [rows, ceil(vocab / 32)] on the CPU, all bits set before; bit t % 32 of word t // 32 is token t.
        """

    def accept(self, token: int) -> bool:
        """Advance by one token; False, without effect, for a token that is not allowed."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""


class Speculator(Protocol):
    """Record of one completion, by which drafts are made for it."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Report how many tokens of the last draft that ran were accepted; the draft may have been cut."""


class PagedTokens(Protocol):
    """Tokens over pages of a cache; `num_computed_tokens` of them are there."""

    tokens: list[int]
    draft_tokens: list[int]  # behind them
    num_computed_tokens: int
    pages: list[int]
    table_row: int  # of the table of pages that a step reads
    num_synced_pages: int  # how many pages stand in it


class GrammarBackend(Protocol):
    """Compiler of grammars."""

    def check(self, constraint: Mapping[str, Any]) -> None:
        """Raise `InputError` for what `open` would refuse; may be called from any thread."""

    def open(self, constraint: Mapping[str, Any]) -> Grammar:
        """Return a new state of `Request.grammar`, one for each completion; raises `InputError`."""
