"""Logits of token sequences over a step with a KV cache: a sequence that goes on from one of the call before computes
its new tokens only.

So a loop over whole sequences, as transformers' `generate` is without a cache of its own, costs what one with a cache
costs, whatever it does between two steps: beams change places, candidates are dropped, a prompt is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..llm.step.encoder_decoder.encoder_decoder_runner import sequence_runner
from ..llm.step.encoder_decoder.source_pages import Source, encode, source_inputs, source_length
from ..llm.step.full_sequence_runner import attention_inputs, state_inputs
from ..llm.step.step_shape import StepShape

Tokens = list[int]


class Origin(NamedTuple):
    """Beginning of a sequence: `done` tokens of sequence `row` of the call before; -1: it is new."""

    row: int = -1
    done: int = 0


class SequenceCache:
    """Pages and states of the sequences of the last call; safe to call from many threads.

    Each sequence has pages of its own, a row of a table: those of its source first, then those of its tokens.
    """

    def __init__(self, step: Any, shape: StepShape, device: str) -> None:
        self.shape, self._device = shape, device
        self._runner = sequence_runner(step, shape, device)
        self._step, self._lock = step, threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._tokens: list[Tokens] = []
        self._sources: list[Source | None] = []
        self._of_source = 0  # pages of each sequence that are its source's
        self._table = torch.zeros((0, 0), dtype=torch.int32)
        self._cache: Tensor = self.shape.new_cache(0, self._device)
        self._states = self.shape.new_state(0, self._device)

    def logits(
        self, tokens: Sequence[Tokens], keep: Sequence[int], sources: Sequence[Source] | None = None
    ) -> list[Tensor]:
        """Return the logits of the last `keep` tokens of each sequence, float [keep, vocab].

        `sources`: what the encoder of an encoder-decoder reads, for each sequence. Raises `InputError` for a sequence
        that is empty or longer than the model takes.
        """
        for row in tokens:
            if not 0 < len(row) <= self.shape.max_positions:
                raise InputError(f"expected 1 to {self.shape.max_positions} tokens, got {len(row)}")
        given = [None] * len(tokens) if sources is None else list(sources)
        with self._lock, torch.inference_mode():
            try:
                return self._logits(tokens, keep, given)
            except BaseException:
                self._forget()
                raise

    def _logits(
        self, tokens: Sequence[Tokens], keep: Sequence[int], sources: Sequence[Source | None]
    ) -> list[Tensor]:
        origins = [self._origin(*row) for row in zip(range(len(tokens)), tokens, keep, sources, strict=True)]
        self._take_over(origins, max(map(len, tokens)), sources)
        read = self._read_sources(origins, sources)
        done = [origin.done for origin in origins]
        new = [len(row) - count for row, count in zip(tokens, done, strict=True)]
        table = self._table[:, self._of_source :].contiguous()
        named = attention_inputs(self.shape, done, new, table) | state_inputs(self._states, done, new)
        if read:
            named |= source_inputs(read, new)
        ids = torch.tensor([token for row, count in zip(tokens, done, strict=True) for token in row[count:]])
        ends = torch.tensor(new).cumsum(0).tolist()
        wanted = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, keep, strict=True)])
        found = self._runner.call(ids, wanted, self._cache, named)
        self._tokens, self._sources = [list(row) for row in tokens], list(sources)
        return list(found.cpu().split(list(keep)))

    def _origin(self, place: int, tokens: Tokens, keep: int, source: Source | None) -> Origin:
        """Find the sequence of the last call that begins most like this one, at best the one in the same place."""
        best, most = Origin(), len(tokens) - max(keep, 1)
        for row in sorted(range(len(self._tokens)), key=lambda row: row != place):
            known = self._tokens[row]
            if not _same(source, self._sources[row]):
                continue
            done = min(_common(known, tokens), most)
            if self._states is not None and done < len(known):
                done = 0  # a state can't take back tokens
            if best.row < 0 or done > best.done:
                best = Origin(row, done)
            if done == most or done == len(known):
                break
        return best if best.done or source is not None else Origin()

    def _take_over(self, origins: Sequence[Origin], longest: int, sources: Sequence[Source | None]) -> None:
        """Give each sequence pages, with what those of its origin hold."""
        table, old, states, before = self._table, self._cache, self._states, self._of_source
        known, blocks = len(table), table.shape[1] - before
        of_source = max(before, *(self._pages(source) for source in sources))
        needed = -(-longest // self.shape.page)
        in_place = len(origins) == known and all(o.row in (-1, place) for place, o in enumerate(origins))
        if in_place and of_source == before and needed <= blocks:
            return
        if needed > blocks:
            most = -(-self.shape.max_positions // self.shape.page)
            needed = min(max(needed, 2 * blocks), most)
        each = of_source + max(needed, blocks)
        self._table = torch.arange(len(origins) * each, dtype=torch.int32).reshape(len(origins), each)
        self._of_source = of_source
        self._cache = self.shape.new_cache(self._table.numel(), self._device)
        self._states = self.shape.new_state(len(origins), self._device)
        places = [place for place, origin in enumerate(origins) if origin.row >= 0]
        rows = [origin.row for origin in origins if origin.row >= 0]
        if not rows:
            return
        kept = self._table[places]
        kept = torch.cat([kept[:, :before], kept[:, of_source : of_source + blocks]], 1)
        self._cache[:, kept.flatten()] = old[:, table[rows].flatten()]
        if self._states is not None and states is not None:
            self._states[places] = states[rows]

    def _pages(self, source: Source | None) -> int:
        if source is None or self.shape.source is None:
            return 0
        return -(-source_length(self.shape.source, source) // self.shape.page)

    def _read_sources(
        self, origins: Sequence[Origin], sources: Sequence[Source | None]
    ) -> list[tuple[list[int], int]]:
        """Encode the sources of new sequences, equal ones once; return the pages and the rows of each."""
        found: list[tuple[list[int], int]] = []
        for place, (origin, source) in enumerate(zip(origins, sources, strict=True)):
            if source is None or self.shape.source is None:
                continue
            pages = self._table[place, : self._pages(source)].tolist()
            found.append((pages, source_length(self.shape.source, source)))
            if origin.row >= 0:
                continue
            equal = next((i for i in range(place) if _same(source, sources[i])), None)
            if equal is None:
                encode(self._step, self.shape, source, pages, self._cache)
            else:
                self._cache[:, pages] = self._cache[:, found[equal][0]]
        return found


def _common(known: Tokens, tokens: Tokens) -> int:
    """Return how many first tokens two sequences have in common."""
    if known == tokens[: len(known)]:
        return len(known)
    return next(
        i for i, (one, other) in enumerate([*zip(known, tokens, strict=False), (0, 1)]) if one != other
    )


def _same(one: Source | None, other: Source | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(
        value.shape == other[name].shape and torch.equal(value, other[name]) for name, value in one.items()
    )
