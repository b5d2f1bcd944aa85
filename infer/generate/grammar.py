"""Structured output: constraints as masks over the vocabulary, by llguidance (an Earley parser over bytes).

What can't be enforced is refused with its name, never ignored. Grammars come from strangers: their size, depth, compile
time and the work per token are bounded (`constraints.GrammarLimits`). `Grammars.check` may be called from any thread
and belongs there: it compiles into the cache, so that `open`, in the engine's thread, only copies.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor

from ..errors import GrammarError, InputError, NotUsableError, OverloadedError
from .constraints import Calls, GrammarLimits, read

_WHITESPACE = r"[ \n\t]{1,32}"  # of JSON, between tokens: unbounded, a small model may never stop
_OPTIONS: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": _WHITESPACE}


class _Compiled:
    """A grammar in its first state, alive as long as the cache or a completion holds it."""

    __slots__ = ("__weakref__", "key", "matcher")

    def __init__(self, key: str, matcher: Any) -> None:
        self.key, self.matcher = key, matcher


class Matcher:
    """How far one completion is in its grammar; implements `hooks.Grammar`. One thread at a time."""

    def __init__(self, owner: Grammars, compiled: _Compiled) -> None:
        self._owner, self._compiled = owner, compiled
        self._matcher = compiled.matcher.deep_copy()
        self._ended = (
            False  # by an end token after the last that could come; the library does not count that one
        )

    @property
    def finished(self) -> bool:
        return (self._ended or bool(self._matcher.is_stopped())) and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """Whether the output so far satisfies the grammar."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Raises `GrammarError` when the grammar becomes too complex here; the completion can't go on then."""
        target, words = bitmask[row], self._owner.words
        if target.numel() == words:
            self._matcher.unsafe_compute_mask_ptr(target.data_ptr(), 4 * words)
        else:
            whole = torch.empty(words, dtype=torch.int32)
            self._matcher.unsafe_compute_mask_ptr(whole.data_ptr(), 4 * words)
            shared = min(words, target.numel())
            target.zero_()
            target[:shared] = whole[:shared]
        self._check()  # the library would allow nothing but the end token from here on

    def accept(self, token: int) -> bool:
        """False for a token that may not come; raises `GrammarError` as `fill` does."""
        if self._ended or not 0 <= token < self._owner.vocab_size:
            return False
        if token in self._owner.eos_ids:
            self._ended = self.complete
            return self._ended
        taken = bool(self._matcher.try_consume_tokens([token]))
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        if count and self._ended:
            self._ended, count = False, count - 1
        if count:
            self._matcher.rollback(count)

    def _check(self) -> None:
        """Raise `GrammarError` once a limit is hit; no other completion starts from what this one shares then."""
        if self._matcher.is_error():
            self._owner.forget(self._compiled.key)
            reason = _brief(self._matcher.get_error())
            raise GrammarError(f"the grammar became too complex: {reason}", where="grammar")


class Grammars:
    """Compiles constraints for one tokenizer; implements `hooks.Grammars`.

    `vocab_size`: of the model, which may be more than the tokenizer has; `eos_ids`: what may follow a complete output.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        if find_spec("llguidance") is None:
            raise NotUsableError(
                "structured output needs the package llguidance", hint="pip install 'infer[serve]'"
            )
        self.limits = limits or GrammarLimits()
        self._source, self.eos_ids = tokenizer, tuple(eos_ids)
        self.vocab_size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self.words = -(-self.vocab_size // 32)
        self._tokenizer: Any = None
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._compiling = threading.Semaphore(self.limits.compiling)
        self._cache: OrderedDict[str, tuple[_Compiled, int]] = OrderedDict()
        self._alive: WeakValueDictionary[str, _Compiled] = WeakValueDictionary()

    def check(self, constraint: Mapping[str, Any]) -> None:
        """Compile into the cache. Raises `InputError` naming what is wrong or can't be enforced."""
        self._compiled(constraint)

    def open(self, constraint: Mapping[str, Any]) -> Matcher:
        return Matcher(self, self._compiled(constraint))

    def forget(self, key: str) -> None:
        with self._lock:
            self._cache.pop(key, None)
            self._alive.pop(key, None)

    def __len__(self) -> int:
        return len(self._cache)

    def _compiled(self, constraint: Mapping[str, Any]) -> _Compiled:
        kind, text = read(constraint, self.limits)
        key = hashlib.sha256(f"{kind}:{text}".encode()).hexdigest()
        with self._lock:
            compiled = self._alive.get(key)
        if compiled is None:
            compiled = _Compiled(key, self._within_time(kind, constraint[kind]))
        with self._lock:
            self._alive[key] = compiled
            self._cache[key] = (compiled, len(text))
            self._cache.move_to_end(key)
            while len(self._cache) > self.limits.cached or self._bytes() > self.limits.cached_bytes:
                self._cache.popitem(last=False)
        return compiled

    def _bytes(self) -> int:
        return sum(size for _, size in self._cache.values())

    def _within_time(self, kind: str, value: Any) -> Any:
        """In a thread of its own: the library can't be stopped, but lets go of the interpreter while it compiles."""
        if not self._compiling.acquire(timeout=self.limits.compile_seconds):
            raise OverloadedError("other grammars are being compiled", where="grammar")
        result: list[Any] = []

        def work() -> None:
            try:
                result.append(self._compile(kind, value))
            except Exception as error:  # noqa: BLE001 - handed to the caller
                result.append(error)
            finally:
                self._compiling.release()

        thread = threading.Thread(target=work, name="grammar", daemon=True)
        thread.start()
        thread.join(self.limits.compile_seconds)
        if not result:
            raise InputError(
                f"the grammar takes longer than {self.limits.compile_seconds:g} s to compile", where=kind
            )
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    def _compile(self, kind: str, value: Any) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(
            max_lexer_states=self.limits.lexer_states,
            max_items_in_row=self.limits.row_items,
            step_max_items=20 * self.limits.row_items,
            step_lexer_fuel=self.limits.step_fuel,
            verbose_errors=False,
        )
        tokens = self._tokens()
        try:
            matcher = llguidance.LLMatcher(tokens, self._grammar(kind, value), log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some limits are noticed by the first mask only
        except ValueError as error:
            raise InputError(f"this {kind} can't be read: {_brief(str(error))}", where=kind) from error
        if matcher.is_error():
            raise InputError(f"this {kind} can't be enforced: {_brief(matcher.get_error())}", where=kind)
        return matcher

    def _tokens(self) -> Any:
        with self._loading:
            if self._tokenizer is None:
                import llguidance

                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._source.to_str(), n_vocab=self.vocab_size, eos_token=list(self.eos_ids) or None
                    )
                except ValueError as error:
                    raise NotUsableError(
                        f"this tokenizer can't be constrained: {_brief(str(error))}"
                    ) from error
            return self._tokenizer

    def _grammar(self, kind: str, value: Any) -> str:
        from llguidance import LLMatcher

        if kind in ("json_schema", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else value
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "choice":
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value)))
        return LLMatcher.grammar_from_lark(self._calls(msgspec.convert(value, Calls)))

    def _calls(self, calls: Calls) -> str:
        one, marks = "call", {name: self._mark(getattr(calls, name)) for name in _MARKS}
        one = " ".join(filter(None, (marks["before"], "call", marks["after"])))
        more = f"({marks['between']} {one}){{0,{calls.most - 1}}}" if calls.most > 1 else ""
        start = " ".join(filter(None, (marks["opening"], one, more, marks["closing"])))
        schema = {**calls.schema, "x-guidance": _OPTIONS}
        return f"start: {start}\ncall: %json {json.dumps(schema)}\n"

    def _mark(self, text: str) -> str:
        """Text as terms of the grammar: a token that the tokenizer knows as special is asked for by its id."""
        terms = []
        for piece in re.split(r"(<\|?\w+\|?>|</\w+>|\[[A-Z_]+\])", text):
            number = self._source.token_to_id(piece) if piece else None
            special = number is not None and self._tokenizer.is_special_token(number)
            terms.append(f"<[{number}]>" if special else json.dumps(piece) if piece else "")
        return " ".join(filter(None, terms))


_MARKS = ("opening", "before", "after", "between", "closing")


def _brief(text: str) -> str:
    """The first line of a message of the library, at most 200 characters; its later lines show the grammar."""
    return text.split("\n", 1)[0][:200]
