"""Interfaces of what an engine is made with: the compiler of grammars and the factory of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .requests import Request
from .sequence import Grammar, Speculator


class GrammarBackend(Protocol):
    """Compiler of grammars."""

    def check(self, constraint: Mapping[str, Any]) -> None:
        """Raise `InputError` for what `open` would refuse; may be called from any thread."""

    def open(self, constraint: Mapping[str, Any]) -> Grammar:
        """Return a new state of `Request.grammar`, one for each completion; raises `InputError`."""


class Speculation(Protocol):
    """Factory of speculators, one for each completion."""

    def open(self, request: Request) -> Speculator | None:
        """Return the speculator of a completion, or None for no drafts."""

    def measured(self, tokens: int, sequences: int, seconds: float) -> None:
        """Report the seconds of a step without prefill: `tokens` (drafts included) of `sequences` sequences."""
