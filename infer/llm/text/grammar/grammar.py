"""Structured output: grammars as masks over the vocabulary.

A constraint that can't be enforced is refused by name, never ignored. Grammars are untrusted input: their size, depth,
compile time and work per token are bounded (`grammar_request.GrammarLimits`). Call `GrammarCache.check` outside the
engine's thread: it compiles into the cache, so that `open`, in the engine's thread, only copies.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ....distribution import install
from ....errors import GrammarError, InputError, NotUsableError, OverloadedError
from .grammar_compiler import GrammarCompiler, brief
from .grammar_request import GrammarLimits, read

GROWTH = 2 << 20  # bytes by which a grammar grows while it is used


class _Compiled:
    """Compiled grammar in its first state, alive as long as the cache or a completion holds it; `size` in bytes."""

    __slots__ = ("__weakref__", "key", "matcher", "size")

    def __init__(self, key: str, matcher: Any, size: int) -> None:
        self.key, self.matcher, self.size = key, matcher, size


class Matcher:
    """State of one completion within its grammar. One thread at a time."""

    def __init__(self, owner: GrammarCache, compiled: _Compiled) -> None:
        self._owner, self._compiled = owner, compiled
        self._matcher = compiled.matcher.deep_copy()
        self._ended = (
            False  # by an end token after the last that could come; the library does not count that one
        )

    @property
    def finished(self) -> bool:
        """True when no token may follow: the completion ends here, without an end token."""
        return (self._ended or bool(self._matcher.is_stopped())) and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """True when the output so far satisfies the grammar."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write to `bitmask[row]` the tokens that may come next, the end token where the output may end.

        int32 [rows, ceil(vocab / 32)] on the CPU; bit t % 32 of word t // 32 is token t. Raises `GrammarError` when the
        grammar becomes too complex here: the completion can't go on then.
        """
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
        """Advance by one token; False for a token that is not allowed. Raises `GrammarError` as `fill` does."""
        if self._ended or not 0 <= token < self._owner.vocab_size:
            return False
        if token in self._owner.eos_ids:
            self._ended = self.complete
            return self._ended
        taken = bool(self._matcher.try_consume_tokens([token]))
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        if count and self._ended:
            self._ended, count = False, count - 1
        if count:
            self._matcher.rollback(count)

    def _check(self) -> None:
        """Raise `GrammarError` once a limit is hit, and drop the compiled grammar from the cache."""
        if self._matcher.is_error():
            self._owner.forget(self._compiled.key)
            reason = brief(self._matcher.get_error())
            raise GrammarError(f"the grammar became too complex: {reason}", where="grammar")


class GrammarCache:
    """Compiled grammars of one tokenizer; `check` may be called from any thread.

    `vocab_size`: of the model, which may exceed the tokenizer's; `eos_ids`: tokens that may follow a complete output.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        if find_spec("llguidance") is None:
            raise NotUsableError("structured output needs the package llguidance", hint=install("serve"))
        self.limits = limits or GrammarLimits()
        self.eos_ids = tuple(eos_ids)
        self._compiler = GrammarCompiler(tokenizer, vocab_size, eos_ids, self.limits)
        self.vocab_size = self._compiler.vocab_size
        self.words = -(-self.vocab_size // 32)
        self._lock = threading.Lock()
        self._compiling = threading.Semaphore(self.limits.compiling)
        self._compiling_long = threading.Semaphore(1)
        self._cache: OrderedDict[str, _Compiled] = OrderedDict()
        self._alive: WeakValueDictionary[str, _Compiled] = WeakValueDictionary()

    def check(self, constraint: Mapping[str, Any], size: int = 0, seconds: float = 0.0) -> None:
        """Compile into the cache. `size`, `seconds`: bytes and time that the grammar took in a trial.

        Raises `InputError` naming what is wrong or can't be enforced, `OverloadedError` while the grammars in use take
        all memory for them.
        """
        self._compiled(constraint, size, seconds)

    def open(self, constraint: Mapping[str, Any]) -> Matcher:
        return Matcher(self, self._compiled(constraint))

    def forget(self, key: str) -> None:
        with self._lock:
            self._cache.pop(key, None)
            self._alive.pop(key, None)

    def __len__(self) -> int:
        return len(self._cache)

    def _compiled(self, constraint: Mapping[str, Any], size: int = 0, seconds: float = 0.0) -> _Compiled:
        kind, text = read(constraint, self.limits)
        key = hashlib.sha256(f"{kind}:{text}".encode()).hexdigest()
        with self._lock:
            compiled = self._alive.get(key)
        if compiled is None:
            size = (size or len(text)) + GROWTH
            self._make_room(size)
            compiled = _Compiled(key, self._within_time(kind, constraint[kind], seconds), size)
        with self._lock:
            self._alive[key] = compiled
            self._cache[key] = compiled
            self._cache.move_to_end(key)
            self._shrink(self.limits.cached_bytes)
        return compiled

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._shrink(self.limits.cached_bytes - size)
            if size + _bytes(self._alive) > self.limits.used_bytes:
                self._shrink(0)
            if size + _bytes(self._alive) > self.limits.used_bytes:
                raise OverloadedError("grammars of other requests take all memory for them", where="grammar")

    def _shrink(self, most: int) -> None:
        while self._cache and (len(self._cache) > self.limits.cached or _bytes(self._cache) > most):
            self._cache.popitem(last=False)

    def _within_time(self, kind: str, value: Any, tried: float) -> Any:
        """Compile in another thread with a time limit; one that was long in its trial waits for no place of the others.

        The library can't be stopped, but it releases the interpreter lock while it compiles.
        """
        places = self._compiling_long if tried > self.limits.long_seconds else self._compiling
        if not places.acquire(timeout=self.limits.compile_seconds):
            raise OverloadedError("other grammars are being compiled", where="grammar")
        compiled = Future[Any]()

        def work() -> None:
            try:
                compiled.set_result(self._compiler.compile(kind, value))
            except Exception as error:  # noqa: BLE001 - raised to the caller
                compiled.set_exception(error)
            finally:
                places.release()

        threading.Thread(target=work, name="grammar", daemon=True).start()
        try:
            return compiled.result(self.limits.compile_seconds)
        except TimeoutError as error:
            seconds = self.limits.compile_seconds
            raise InputError(f"the grammar takes longer than {seconds:g} s to compile", where=kind) from error


def _bytes(grammars: Mapping[str, _Compiled]) -> int:
    return sum(compiled.size for compiled in list(grammars.values()))
