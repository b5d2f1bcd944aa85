"""Compiler of grammars by llguidance, an Earley parser over bytes; needs no torch, so small processes can use it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import GrammarError, InputError, NotUsableError
from .grammar_request import GrammarLimits, ToolCallGrammar
from .unique_items import without_unique_items

_WHITESPACE = r"[ \n\t]{1,32}"  # of JSON, between tokens: unbounded, a small model may never stop
_OPTIONS: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITESPACE}
_MARKS = ("opening", "before", "after", "between", "closing")


class GrammarCompiler:
    """Makes matchers for one tokenizer. `vocab_size`: of the model, which may exceed the tokenizer's."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        self.limits = limits or GrammarLimits()
        self.vocab_size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self._source, self._eos_ids = tokenizer, tuple(eos_ids)
        self._tokenizer: Any = None
        self._loading = threading.Lock()

    def compile(self, kind: str, value: Any) -> Any:
        """Return an `LLMatcher` in its first state; `InputError` names what is wrong or can't be enforced."""
        import llguidance

        limits = llguidance.LLParserLimits(
            max_lexer_states=self.limits.lexer_states,
            max_items_in_row=self.limits.row_items,
            step_max_items=self.limits.step_items,
            step_lexer_fuel=self.limits.step_fuel,
            verbose_errors=False,
        )
        tokens = self.load()
        try:
            matcher = llguidance.LLMatcher(tokens, self._grammar(kind, value), log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some limits are noticed by the first mask only
        except ValueError as error:
            raise InputError(f"this {kind} can't be read: {brief(str(error))}", where=kind) from error
        if matcher.is_error():
            raise GrammarError(f"this {kind} can't be enforced: {brief(matcher.get_error())}", where=kind)
        return matcher

    def load(self) -> Any:
        """Convert the tokenizer to the library's form; raises `NotUsableError` if it can't be."""
        with self._loading:
            if self._tokenizer is None:
                import llguidance

                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._source.to_str(),
                        n_vocab=self.vocab_size,
                        eos_token=list(self._eos_ids) or None,
                    )
                except ValueError as error:
                    raise NotUsableError(
                        f"this tokenizer can't be constrained: {brief(str(error))}"
                    ) from error
            return self._tokenizer

    def _grammar(self, kind: str, value: Any) -> str:
        from llguidance import LLMatcher

        if kind in ("json_schema", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else without_unique_items(value)
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "choice":
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value)))
        return LLMatcher.grammar_from_lark(self._calls(msgspec.convert(value, ToolCallGrammar)))

    def _calls(self, calls: ToolCallGrammar) -> str:
        one, marks = "call", {name: self._mark(getattr(calls, name)) for name in _MARKS}
        one = " ".join(filter(None, (marks["before"], "call", marks["after"])))
        more = f"({marks['between']} {one}){{0,{calls.most - 1}}}" if calls.most > 1 else ""
        start = " ".join(filter(None, (marks["opening"], one, more, marks["closing"])))
        schema = {**without_unique_items(calls.schema), "x-guidance": _OPTIONS}
        return f"start: {start}\ncall: %json {json.dumps(schema)}\n"

    def _mark(self, text: str) -> str:
        """Write text as terms of the grammar; special tokens of the tokenizer are required by their id."""
        terms = []
        for piece in re.split(r"(<\|?\w+\|?>|</\w+>|\[[A-Z_]+\])", text):
            number = self._source.token_to_id(piece) if piece else None
            special = number is not None and self._tokenizer.is_special_token(number)
            terms.append(f"<[{number}]>" if special else json.dumps(piece) if piece else "")
        return " ".join(filter(None, terms))


def brief(text: str) -> str:
    """Return the first line of a message of the library, at most 200 characters; later lines show the grammar."""
    return text.split("\n", 1)[0][:200]
