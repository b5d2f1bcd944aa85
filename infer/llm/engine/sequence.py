"""State of a request and of its completions, as scheduler, sampler and engine see it.

A page of the prefix cache is found by a hash of its tokens and of all tokens before it. The chain begins with what the
pages depend on besides tokens: adapter, salt, and the source of an encoder-decoder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from .requests import Request, TokenLogprob

if TYPE_CHECKING:
    from ..text.grammar.grammar import Matcher
    from ..text.stop_strings import TextStream
    from .sampling.penalties import TokenCounts

Rank = tuple[float, int, int]


class RequestState:
    """State of one request. `rank`: its fixed order; one step of priority is worth `aging` seconds of waiting.

    Of an encoder-decoder `start` is what the decoder begins with, if the encoder reads the prompt of the request, and
    `source_rows` the length of the encoder's output. `bad_words`: their token ids.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        arrival: float,
        aging: float,
        *,
        start: tuple[int, ...] = (),
        source_rows: int = 0,
        bad_words: Many[tuple[int, ...]] = (),
    ) -> None:
        self.request, self.sampling = request, request.sampling
        self.rank = (arrival + request.priority * aging, number)
        self.arrival = arrival
        self.started_at: float | None = None  # when a step first read of its prompt
        self.prompt = list(start) or request.prompt  # of the decoder
        self.source_rows = source_rows
        self.prompt_length = len(self.prompt)
        self.adapter = 0  # its slot
        source = _hash_page(request.features or b"", request.prompt).hex() if source_rows else None
        marks = (request.salt,) if source is None else (request.salt, source)
        self.root_hash = _hash_root(request.adapter or "", *marks)
        sampling = request.sampling
        self.seed = int.from_bytes(os.urandom(8)) if sampling.seed is None else sampling.seed
        self.sequences: list[Sequence] = []
        self.forked = sampling.n == 1
        self.unfinished = sampling.n
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if sampling.prompt_logprobs is None else [None]
        )
        self.cached_tokens = 0
        self.allowed_tokens = np.array(sampling.allowed_token_ids, dtype=np.int64)  # empty: all
        self.bad_words = bad_words
        self.has_penalties = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        # True where sampling needs only temperature, top-k, top-p and min-p, and outputs are tokens and text alone.
        self.fast_decode = (
            not self.has_penalties
            and not sampling.logit_bias
            and not sampling.allowed_token_ids
            and not bad_words
            and sampling.logprobs is None
            and sampling.min_tokens == 0
            and request.grammar is None
            and request.transcription is None
        )

    def use_adapter(self, slot: int, key: str) -> None:
        self.adapter, self.root_hash = slot, _hash_root(key, self.request.salt)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while logits of prompt tokens are still needed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    def add_prompt_logprobs(self, values: list[TokenLogprob]) -> None:
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += values


class Speculator(Protocol):
    """Record of one completion, by which drafts are made for it."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Report how many tokens of the last draft that ran were accepted; the draft may have been cut."""


class Sequence:
    """One completion. `tokens`: prompt and output; the first `num_computed_tokens` are in `pages`."""

    __slots__ = (
        "draft_tokens", "fast_decode", "finished", "grammar", "index", "num_cached_tokens", "num_computed_tokens",
        "num_output_tokens", "num_synced_pages", "page_hashes", "pages", "rank", "sampled_on_host", "snapshot",
        "source_pages",
        "source_ready", "speculator", "state", "state_row", "table_row", "tenant", "text", "token_counts", "tokens",
        "written_rows",
    )  # fmt: skip

    def __init__(self, state: RequestState, index: int) -> None:
        self.state, self.index = state, index
        self.rank: Rank = (*state.rank, index)
        self.fast_decode = state.fast_decode
        self.tenant = state.request.tenant
        self.tokens = list(state.prompt)
        self.num_output_tokens = 0  # how many of the tokens are output
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # how many of those were found in the prefix cache, when it last started
        self.pages: list[int] = []
        self.source_pages: list[int] = []
        self.source_ready = not state.source_rows  # true when those hold its source
        self.page_hashes: list[bytes] = []  # of full pages, as far as asked for
        self.table_row = -1  # its row among the running ones
        self.num_synced_pages = 0  # how many of its pages stand in that row
        self.state_row = -1  # of the state cache, after the computed tokens; -1: none
        self.written_rows: list[
            tuple[int, int]
        ] = []  # by the step that runs: after how many tokens, and the row
        self.snapshot = b""  # hash of its last page of output whose state was kept
        self.draft_tokens: list[int] = []
        self.finished = False
        # A recorded step can't sample its tokens: logprobs, what depends on the last ones, or a flat distribution.
        self.sampled_on_host = (
            state.sampling.logprobs is not None
            or state.request.transcription is not None
            or bool(state.bad_words)
        )
        self.grammar: Matcher | None = None
        self.speculator: Speculator | None = None
        self.text: TextStream | None = None
        self.token_counts: TokenCounts | None = None

    @property
    def source_left(self) -> int:
        """Rows of its source that the encoder has still to compute."""
        return 0 if self.source_ready else self.state.source_rows

    def last_output(self, count: int, num_drafts: int = 0) -> list[int]:
        """Return the last `count` tokens of the output, and `num_drafts` of the draft behind them."""
        start = max(self.state.prompt_length, len(self.tokens) - count)
        return [*self.tokens[start:], *self.draft_tokens[:num_drafts]]

    def page_hash(self, block: int, page: int) -> bytes:
        """Return the hash of a full page; the tokens up to its end must exist."""
        while len(self.page_hashes) <= block:
            start = len(self.page_hashes) * page
            parent = self.page_hashes[-1] if self.page_hashes else self.state.root_hash
            self.page_hashes.append(_hash_page(parent, self.tokens[start : start + page]))
        return self.page_hashes[block]


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of a sequence from `num_computed_tokens` on; draft tokens follow its own tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """True for a decode of the next token, False for a prefill or a recomputation."""
        sequence = self.sequence
        return sequence.num_output_tokens > 0 and sequence.num_computed_tokens + 1 == len(sequence.tokens)


def _hash_page(parent: bytes, tokens: Many[int]) -> bytes:
    """Hash a full page: its tokens and, through `parent`, all tokens before it."""
    return hashlib.sha256(parent + np.array(tokens, dtype=np.int64).tobytes()).digest()


def _hash_root(*marks: str) -> bytes:
    """Hash adapter and cache salt to the parent hash of a sequence's first page."""
    return hashlib.sha256("\0".join(f"{len(mark)}:{mark}" for mark in marks).encode()).digest()
