"""Sequences of a schedule over one paged cache: their pages, rows and the calls of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..encoder_decoder.source_pages import Source, encode, source_inputs, source_length
from ..full_sequence_runner import FullSequenceRunner, attention_inputs


class Call(NamedTuple):
    """One call of a step, as far as one schedule has a part in it: new tokens of its sequences.

    `last`: logits of each sequence's last new token alone. `draft`: token ids that are computed and then rejected.
    """

    new: tuple[tuple[int, int], ...]  # (sequence, tokens)
    last: bool = False
    draft: Tensor | None = None


@dataclass(frozen=True)
class Schedule:
    """One way to compute sequences. `sequences`: the window of each sequence that is played."""

    name: str
    words: str
    sequences: tuple[int, ...]
    play: Callable[[ScheduleRun], Iterator[Call]]


class ScheduleRun:
    """Sequences of one schedule in a cache, perhaps beside those of other schedules. `done`: tokens of each so far.

    `logits`: of each sequence, by position.
    """

    def __init__(self, cache: _Cache, first: int, sequences: Sequence[Tensor]) -> None:
        self._cache, self._first = cache, first  # the number of its first sequence in the cache
        self.shape, self.sequences = cache.shape, sequences
        self.done = [0] * len(sequences)
        self.logits: list[dict[int, Tensor]] = [{} for _ in sequences]

    def left(self, index: int) -> int:
        return len(self.sequences[index]) - self.done[index]

    def release(self, index: int) -> None:
        """Preempt a sequence: its pages are free, its tokens have to be recomputed."""
        self._cache.release(self._first + index)
        self.done[index] = 0

    def share(self, index: int, other: int) -> None:
        """Start a sequence with the full pages of another one of the same tokens; the last token is computed."""
        count = min(self.done[other], len(self.sequences[index]) - 1) // self.shape.page
        self._cache.share(self._first + index, self._first + other, count)
        self.done[index] = count * self.shape.page

    def parts(self, call: Call) -> list[_Part]:
        """Return what a call computes, a part for each sequence that gets tokens."""
        parts = []
        for i, count in call.new:
            if count > 0:
                done = self.done[i]
                ids = self.sequences[i][done : done + count] if call.draft is None else call.draft
                wanted = range(done + count - 1 if call.last else done, done + count)
                parts.append(_Part(self, i, self._first + i, done, ids, wanted, kept=call.draft is None))
        return parts


class _Part(NamedTuple):
    """Tokens of one sequence in a call. `wanted`: positions whose logits are asked for; `kept`: no draft."""

    run: ScheduleRun
    place: int  # of the sequence in its schedule
    sequence: int  # its number in the cache
    done: int
    ids: Tensor
    wanted: range
    kept: bool


def play(
    stepping: FullSequenceRunner,
    schedules: Sequence[tuple[Schedule, Sequence[Tensor]]],
    sources: Sequence[Source] = (),
) -> list[ScheduleRun]:
    """Play schedules with their sequences in lockstep: each call of the step holds the next one of every schedule.

    `sources`: of an encoder-decoder, one for each sequence of all schedules. Raises `WrongShape`.
    """
    cache = _Cache(stepping, [ids for _, sequences in schedules for ids in sequences], sources)
    runs, first = [], 0
    for _, sequences in schedules:
        runs.append(ScheduleRun(cache, first, sequences))
        first += len(sequences)
    waiting = [(run, schedule.play(run)) for run, (schedule, _) in zip(runs, schedules, strict=True)]
    while waiting:
        calls = [(run, calls, next(calls, None)) for run, calls in waiting]
        waiting = [(run, calls) for run, calls, call in calls if call is not None]
        if parts := [part for run, _, call in calls if call is not None for part in run.parts(call)]:
            cache.compute(parts)
    return runs


class _Cache:
    """A small pool of pages for sequences, allocated in no order; freed pages are reused first."""

    def __init__(
        self, stepping: FullSequenceRunner, sequences: Sequence[Tensor], sources: Sequence[Source]
    ) -> None:
        self._call, self.shape = stepping.call, stepping.shape
        self._sources = _Sources(stepping, sources)
        count = sum(-(-len(ids) // self.shape.page) for ids in sequences) + 2 + self._sources.num_pages
        self._tensor = self.shape.new_cache(count, stepping.device)
        self._states = _States(self.shape.new_state(3 * len(sequences), stepping.device), self.shape.page)
        self._free = [*range(0, count, 2), *range(1, count, 2)]
        self._pages: list[list[int]] = [[] for _ in sequences]

    def release(self, sequence: int) -> None:
        self._free.extend([*self._pages[sequence], *self._sources.pages.pop(sequence, [])])
        self._pages[sequence] = []

    def share(self, sequence: int, other: int, num_pages: int) -> None:
        self._pages[sequence] = self._pages[other][:num_pages]
        self._states.share(sequence, other)
        self._sources.share(sequence, other)

    def compute(self, parts: Sequence[_Part]) -> None:
        """Call the step once, and give each part the logits of its wanted positions."""
        page = self.shape.page
        for part in parts:
            pages = self._pages[part.sequence]
            while len(pages) * page < part.done + len(part.ids):
                pages.append(self._free.pop())
        table = torch.zeros((len(parts), max(len(self._pages[p.sequence]) for p in parts)), dtype=torch.int32)
        for row, part in zip(table, parts, strict=True):
            row[: len(self._pages[part.sequence])] = torch.tensor(
                self._pages[part.sequence], dtype=torch.int32
            )
        counts = [len(part.ids) for part in parts]
        named = attention_inputs(self.shape, [part.done for part in parts], counts, table)
        named |= self._states.inputs(parts)
        new = [(part.sequence, count) for part, count in zip(parts, counts, strict=True)]
        named |= self._sources.inputs(new, self._free, self._tensor)
        starts = named["query_start"][:-1].tolist()
        rows = [
            start + position - part.done
            for start, part in zip(starts, parts, strict=True)
            for position in part.wanted
        ]
        ids = torch.cat([part.ids for part in parts])
        answers = self._call(ids, torch.tensor(rows), self._tensor, named)
        if answers.shape != (len(rows), self.shape.vocab_size):
            raise WrongShape([len(rows), self.shape.vocab_size], list(answers.shape))
        logits = iter(answers.detach().cpu())
        for part in parts:
            of_part = dict(zip(part.wanted, logits, strict=False))  # the next parts take the rest
            if part.kept:
                part.run.logits[part.place] |= of_part
                part.run.done[part.place] += len(part.ids)


class _Sources:
    """Pages of the source of each sequence, encoded before its first step and again after a preemption."""

    def __init__(self, stepping: FullSequenceRunner, sources: Sequence[Source]) -> None:
        self._stepping, self._sources = stepping, sources
        self.pages: dict[int, list[int]] = {}
        self.num_pages = 0
        if sources and (source := stepping.shape.source) is not None:
            self.rows = [source_length(source, given) for given in sources]
            self.num_pages = sum(map(self._count, range(len(sources))))

    def _count(self, index: int) -> int:
        return -(-self.rows[index] // self._stepping.shape.page)

    def share(self, index: int, other: int) -> None:
        if self._sources:
            self.pages[index] = self.pages[other]

    def inputs(self, new: Sequence[tuple[int, int]], free: list[int], cache: Tensor) -> dict[str, Tensor]:
        """Return the inputs about sources of a call, {} without any; `new`: sequence, new tokens."""
        if not self._sources:
            return {}
        for index, _ in new:
            if index not in self.pages:
                self.pages[index] = [free.pop() for _ in range(self._count(index))]
                shape, given = self._stepping.shape, self._sources[index]
                encode(self._stepping.step, shape, given, self.pages[index], cache)
        return source_inputs([(self.pages[i], self.rows[i]) for i, _ in new], [n for _, n in new])


class _States:
    """Rows of a state cache: two for each sequence, read and written in turns, and one for its last whole page."""

    def __init__(self, cache: Tensor | None, page: int) -> None:
        self._cache, self._page = cache, page
        self._current: dict[int, int] = {}

    def inputs(self, parts: Sequence[_Part]) -> dict[str, Tensor]:
        """Return the state inputs of a call, {} without state layers."""
        if self._cache is None:
            return {}
        segments, at = [], 0
        for part in parts:
            index, done, count, kept = part.sequence, part.done, len(part.ids), part.kept
            read, end = self._current.get(index, -1) if done else -1, at + count
            written = 3 * index if read != 3 * index else 3 * index + 1
            whole = (done + count) // self._page * self._page
            if kept and whole > done:
                segments.append((at, at + whole - done, read, 3 * index + 2))
                at, read = at + whole - done, 3 * index + 2
            segments.append((at, end, read, written if kept else -1))
            at = end
            if kept:
                self._current[index] = written
        return {"state_cache": self._cache, "state_segments": torch.tensor(segments, dtype=torch.int64)}

    def share(self, index: int, other: int) -> None:
        """Give a sequence the state of another one after its last whole page."""
        if self._cache is not None:
            self._current[index] = 3 * index
            self._cache[3 * index] = self._cache[3 * other + 2]


class WrongShape(Exception):
    """Logits of another shape than the requested rows."""

    def __init__(self, expected: list[int], got: list[int]) -> None:
        super().__init__(f"expected logits {expected}, got {got}")
