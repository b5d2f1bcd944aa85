"""Sequences of a schedule over one paged cache: their pages, rows and the calls of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..encoder_decoder.source_pages import Source, encode, source_inputs, source_length
from ..full_sequence_runner import attention_inputs
from ..step_shape import StepShape


class StepCaller(Protocol):
    """Caller of a step, such as `FullSequenceRunner`."""

    shape: StepShape
    device: str

    def call(self, ids: Tensor, rows: Tensor, cache: Tensor, named: Mapping[str, Tensor]) -> Tensor: ...


class ScheduleRun:
    """Sequences over a small pool of pages, allocated in no order; freed pages are reused first."""

    def __init__(
        self, stepping: StepCaller, sequences: Sequence[Tensor], sources: Sequence[Source] = ()
    ) -> None:
        self._call, shape = stepping.call, stepping.shape
        self.shape, self.sequences = shape, sequences
        self._sources = _Sources(stepping, sources)
        count = sum(-(-len(ids) // shape.page) for ids in sequences) + 2 + self._sources.num_pages
        self._cache = shape.new_cache(count, stepping.device)
        self._states = _States(shape.new_state(3 * len(sequences), stepping.device), shape.page)
        self._free = [*range(0, count, 2), *range(1, count, 2)]
        self.done = [0] * len(sequences)
        self.logits: list[dict[int, Tensor]] = [{} for _ in sequences]
        self._pages: list[list[int]] = [[] for _ in sequences]

    def left(self, index: int) -> int:
        return len(self.sequences[index]) - self.done[index]

    def step(self, *new: tuple[int, int], last: bool = False) -> None:
        """Make one call with `tokens` more of each (sequence, tokens); `last`: logits of each last token alone."""
        new = tuple((i, n) for i, n in new if n > 0)
        if not new:
            return
        ids = [self.sequences[i][self.done[i] : self.done[i] + n] for i, n in new]
        answers = self._run(new, torch.cat(ids), last)
        at = 0
        for i, n in new:
            kept = range(self.done[i] + n - 1 if last else self.done[i], self.done[i] + n)
            for position in kept:
                self.logits[i][position] = answers[at]
                at += 1
            self.done[i] += n

    def draft(self, index: int, ids: Tensor) -> None:
        """Compute tokens that are then rejected."""
        self._run(((index, len(ids)),), ids, last=True, kept=False)

    def release(self, index: int) -> None:
        """Preempt a sequence: its pages are free, its tokens have to be recomputed."""
        self._free.extend([*self._pages[index], *self._sources.pages.pop(index, [])])
        self._pages[index], self.done[index] = [], 0

    def share(self, index: int, other: int) -> None:
        """Start a sequence with the full pages of another one of the same tokens; the last token is computed."""
        page = self.shape.page
        count = min(self.done[other], len(self.sequences[index]) - 1) // page
        self._pages[index] = self._pages[other][:count]
        self.done[index] = count * page
        self._states.share(index, other)
        self._sources.share(index, other)

    def _run(self, new: Sequence[tuple[int, int]], ids: Tensor, last: bool, kept: bool = True) -> Tensor:
        page = self.shape.page
        for i, n in new:
            while len(self._pages[i]) * page < self.done[i] + n:
                self._pages[i].append(self._free.pop())
        widest = max(len(self._pages[i]) for i, _ in new)
        table = torch.zeros((len(new), widest), dtype=torch.int32)
        for row, (i, _) in enumerate(new):
            table[row, : len(self._pages[i])] = torch.tensor(self._pages[i], dtype=torch.int32)
        counts = [n for _, n in new]
        named = attention_inputs(self.shape, [self.done[i] for i, _ in new], counts, table)
        named |= self._states.inputs([(i, self.done[i], n) for i, n in new], kept=kept)
        named |= self._sources.inputs(new, self._free, self._cache)
        rows = named["query_start"][1:].long() - 1 if last else torch.arange(len(ids))
        answers = self._call(ids, rows, self._cache, named)
        if answers.shape != (len(rows), self.shape.vocab_size):
            raise WrongShape([len(rows), self.shape.vocab_size], list(answers.shape))
        return answers.detach().cpu()


class _Sources:
    """Pages of the source of each sequence, encoded before its first step and again after a preemption."""

    def __init__(self, stepping: Any, sources: Sequence[Source]) -> None:
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

    def inputs(self, new: Sequence[tuple[int, int, int]], *, kept: bool) -> dict[str, Tensor]:
        """Return the state inputs of a call; `new`: sequence, tokens done, new tokens. {} without state layers."""
        if self._cache is None:
            return {}
        segments, at = [], 0
        for index, done, count in new:
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
