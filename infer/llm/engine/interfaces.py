"""What the engine asks of others: constraints on the output, drafts of what may come. Passed in as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from .requests import Request


class Grammar(Protocol):
    """A constraint and how far one completion is in it."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow: the completion ends here, without an end token."""

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Say in `bitmask[row]` which tokens may come next, the end token where it may end.

        int32 [rows, ceil(vocab / 32)] on the CPU; bit t % 32 of word t // 32 stands for token t. All set before.
        """

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing happens, when it may not come."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""


class Grammars(Protocol):
    def check(self, constraint: Mapping[str, Any]) -> None:
        """Raise `InputError` for what `open` would refuse; from any thread."""

    def open(self, constraint: Mapping[str, Any]) -> Grammar:
        """A fresh state of `Request.grammar`; called once for each completion. Raises `InputError`."""


class Speculator(Protocol):
    """Guesses how one sequence goes on."""

    def draft(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens that may follow prompt and output so far; none when it is not worth trying."""

    def observe(self, drafted: int, accepted: int) -> None:
        """How the last draft that ran fared; it may have been cut."""


class Speculation(Protocol):
    def open(self, request: Request) -> Speculator | None:
        """For one completion; None where it is not wanted."""

    def measured(self, tokens: int, sequences: int, seconds: float) -> None:
        """What a step without prefill took that ran `tokens` tokens (drafts included) of so many sequences."""
