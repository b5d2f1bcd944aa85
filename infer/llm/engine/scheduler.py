"""Which tokens run in the next step: decode first, then pieces of prompts, within a budget of tokens and pages.

Requests of one tenant are ordered by rank (arrival, moved by priority; see `Job`), tenants by what they were given (see
`fairness`). No two sequences push each other out in turns: the oldest of those that come first for their tenants can
take the pages of all others, and what is admitted fits alone, so there is always somebody who goes on.
"""

from __future__ import annotations

import itertools
from bisect import insort
from typing import NamedTuple

from .block_manager import PagePool
from .fairness import OLDEST, Shares, arrived
from .limits import EngineLimits
from .sequence import Rank, Sequence


class Work(NamedTuple):
    """The next `size` tokens of a sequence, counted from `sequence.computed`; drafts stand after its tokens."""

    sequence: Sequence
    size: int

    @property
    def decodes(self) -> bool:
        """Whether it goes on with an output, as opposed to reading a prompt or what was computed before."""
        sequence = self.sequence
        return sequence.outputs > 0 and sequence.computed + 1 == len(sequence.tokens)


class Scheduler:
    def __init__(self, pool: PagePool, limits: EngineLimits) -> None:
        self.pool, self.limits = pool, limits
        self.shares = Shares()
        self.waiting: list[Sequence] = []  # both in order of rank
        self.running: list[Sequence] = []
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self.free_slots = list(range(limits.max_running - 1, -1, -1))
        self._turn = 0
        self._reserve = max(1, int(pool.total * limits.watermark))

    def add(self, sequence: Sequence) -> None:
        self.shares.join(sequence.tenant, itertools.chain(self.waiting, self.running))
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """It is over, wherever it is; its pages are free at once."""
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` goes on where `parent` is, on the same pages; with no place for it, it waits and recomputes."""
        if not self.free_slots:
            self.add(child)
            return
        child.computed, child.names = parent.computed, list(parent.names)
        child.pages = list(parent.pages)
        for page in child.pages:
            self.pool.share(page)
        self._enter(child)

    def plan(self) -> list[Work]:
        """What to run next, pages taken for it; empty when there is nothing."""
        self._make_way()
        work = self._plan_alone() if self.limits.batch_invariant else self._plan()
        for item in work:
            self.shares.charge(item.sequence, item.size, output=item.decodes)
        return work

    def _plan(self) -> list[Work]:
        work = self._decodes()
        budget = self.limits.step_tokens - sum(item.size for item in work)
        if work:
            budget = min(budget, self.limits.mixed_tokens)
        if budget > 0:
            work += self._prefills(budget)
        return work

    def _decodes(self) -> list[Work]:
        work: list[Work] = []
        decoding = [s for s in self.running if len(s.tokens) - s.computed == 1]
        budget = self.limits.step_tokens
        spare = budget - len(decoding)
        page, refs = self.pool.page, self.pool.refs
        for sequence in decoding[:budget]:
            if sequence.slot < 0:
                continue  # lost its pages to one before it
            block = sequence.computed // page
            if not sequence.draft and block < len(sequence.pages) and refs[sequence.pages[block]] == 1:
                work.append(Work(sequence, 1))
                continue
            draft = len(sequence.draft)
            if draft and (draft > spare or not self._has_room(sequence, sequence.computed + 1 + draft)):
                del sequence.draft[max(spare, 0) :]
                if not self._has_room(sequence, sequence.computed + 1 + len(sequence.draft)):
                    sequence.draft = []
            if self._make_room(sequence, sequence.computed + 1 + len(sequence.draft)):
                work.append(Work(sequence, 1 + len(sequence.draft)))
                spare -= len(sequence.draft)
        return work

    def _prefills(self, budget: int) -> list[Work]:
        """The one that has waited longest gets a quarter of the budget, the tenant that was given least the rest, its
        shortest first."""
        waiting = self._prefilling()
        if not waiting:
            return []
        counts: dict[int, int] = {}
        scored = self.limits.score_tokens
        order = [min(waiting, key=arrived)]
        if len(waiting) > 1:
            order += sorted(waiting, key=self.shares.shortest)
        for i, sequence in enumerate(order):
            self._adopt(sequence)
            left = len(sequence.tokens) - sequence.computed - counts.get(sequence.slot, 0)
            limit = budget if i or len(order) == 1 else max(budget // OLDEST, 1)
            count = min(left, limit, budget)
            if sequence.job.scoring:
                count = min(count, scored)
                scored -= count
            counts[sequence.slot] = counts.get(sequence.slot, 0) + count
            budget -= count
        return [Work(s, counts[s.slot]) for s in waiting if counts.get(s.slot)]

    def _prefilling(self) -> list[Sequence]:
        """In order of rank, those just admitted included; of each tenant one, however many others there are."""
        found = [s for s in self.running if len(s.tokens) - s.computed > 1]
        while self.waiting:
            first = self.shares.first(self.waiting)
            if len(found) >= self.limits.max_prefills and any(s.tenant == first.tenant for s in found):
                break
            if not self._fits(first, hits := self._match(first)):
                break
            self._admit(first, hits)
            insort(found, first, key=_rank)
        return found

    def _make_way(self) -> None:
        """The first of the waiting takes the places of running ones, where its share or its priority allows it and
        while it lacks its own."""
        while self.waiting and self.running:
            first = self.shares.first(self.waiting)
            lacking = self._lacking(first, self._match(first))
            if self.free_slots and lacking <= 0:
                return
            if (victim := self.shares.victim(first, self.running, lacking)) is None:
                return
            self.preempt(victim)

    def _fits(self, sequence: Sequence, hits: list[int]) -> bool:
        return bool(self.free_slots) and self._lacking(sequence, hits) <= 0

    def _lacking(self, sequence: Sequence, hits: list[int]) -> int:
        """Pages that it would need beyond those that can be had."""
        needed = -(-len(sequence.tokens) // self.pool.page) - len(hits) + sum(map(self.pool.is_idle, hits))
        reserve = self._reserve if self.running else 0
        return needed + reserve - self.pool.available

    def _admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Give the first of the waiting a slot, and pages for all its tokens."""
        pool, page = self.pool, self.pool.page
        blocks = -(-len(sequence.tokens) // page)
        for hit in hits:
            pool.share(hit)
        sequence.pages = [*hits, *(pool.take() for _ in range(blocks - len(hits)))]
        sequence.computed = sequence.cached = len(hits) * page
        self.prefix_queries += len(sequence.tokens)
        self.prefix_hits += sequence.cached
        self.waiting.remove(sequence)
        self.shares.admitted(sequence)
        self._enter(sequence)

    def _match(self, sequence: Sequence) -> list[int]:
        """Known pages of its beginning, one token at least left over to compute."""
        page, step = self.pool.page, self.limits.step_tokens
        if not self.pool.caching or sequence.job.scoring:
            return []
        full = (len(sequence.tokens) - 1) // page
        hits = self.pool.match(sequence.page_name(block, page) for block in range(full))
        if self.limits.batch_invariant:
            del hits[len(hits) * page // step * step // page :]
        return hits

    def _adopt(self, sequence: Sequence) -> None:
        """Take over pages that another with the same beginning has computed meanwhile."""
        pool, page = self.pool, self.pool.page
        if not pool.caching or sequence.job.scoring or sequence.computed % page:
            return
        while sequence.computed + page < len(sequence.tokens):
            block = sequence.computed // page
            known = pool.find(sequence.page_name(block, page))
            if known is None:
                return
            if known != sequence.pages[block]:
                pool.share(known)
                pool.release(sequence.pages[block])
                sequence.pages[block] = known
                sequence.synced = min(sequence.synced, block)
            sequence.computed += page
            sequence.cached += page
            self.prefix_hits += page

    def _has_room(self, sequence: Sequence, length: int) -> bool:
        return self._missing(sequence, length) <= self.pool.available

    def _missing(self, sequence: Sequence, length: int) -> int:
        """Pages to take so that `length` tokens fit and the next one is written to a page of its own."""
        pages, page = sequence.pages, self.pool.page
        block = sequence.computed // page
        shared = block < len(pages) and self.pool.refs[pages[block]] > 1
        return -(-length // page) - len(pages) + shared

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """False when its own pages were taken from it, since all others rank before it."""
        pool, page = self.pool, self.pool.page
        block = sequence.computed // page
        pages = sequence.pages
        if block < len(pages) and length <= len(pages) * page and pool.refs[pages[block]] == 1:
            return True
        while self._missing(sequence, length) > pool.available:
            last = self.shares.last(self.running)
            self.preempt(last)
            if last is sequence:
                return False
        if block < len(pages):
            owned = pool.own(pages[block])
            if owned != pages[block]:
                pages[block] = owned
                sequence.synced = min(sequence.synced, block)
        while len(pages) * page < length:
            pages.append(pool.take())
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Its pages go; it waits in its place by rank, and what it had is computed again."""
        self._leave(sequence)
        sequence.computed = 0
        sequence.draft = []
        insort(self.waiting, sequence, key=_rank)
        self.preemptions += 1

    def advance(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens are in its pages; pages taken for drafts that failed go back."""
        pool, page = self.pool, self.pool.page
        before = sequence.computed // page
        sequence.computed += count
        after = sequence.computed // page
        if after > before and pool.caching:
            end = sequence.computed
            if self.limits.batch_invariant:  # of whole pieces only: other cuts may differ in the last bit
                step = self.limits.step_tokens
                end = min(sequence.computed, sequence.job.prompt_length // step * step)
            for block in range(before, end // page):
                pool.name(sequence.pages[block], sequence.page_name(block, page))

    def trim(self, sequence: Sequence) -> None:
        """Give back pages beyond the computed tokens."""
        keep = -(-sequence.computed // self.pool.page)
        while len(sequence.pages) > keep:
            self.pool.release(sequence.pages.pop())
        sequence.synced = min(sequence.synced, keep)

    def _plan_alone(self) -> list[Work]:
        """Every sequence that decodes, and a piece of one prompt: of the shortest, now and then of the oldest.

        Outputs that are computed again after a preemption run one by one, as they did the first time.
        """
        self._prefilling()  # admits
        work: list[Work] = []
        reading: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.computed < sequence.job.prompt_length and sequence.computed + 1 < len(
                sequence.tokens
            ):
                reading.append(sequence)
            elif sequence.slot >= 0 and self._make_room(sequence, sequence.computed + 1):
                work.append(Work(sequence, 1))
        reading = [sequence for sequence in reading if sequence.slot >= 0]
        if reading:
            self._turn += 1
            order = arrived if self._turn % OLDEST == 0 else self.shares.shortest
            sequence = min(reading, key=order)
            piece = self.limits.step_tokens
            end = min((sequence.computed // piece + 1) * piece, sequence.job.prompt_length)
            work.append(Work(sequence, end - sequence.computed))
        return work

    def _enter(self, sequence: Sequence) -> None:
        sequence.slot, sequence.synced = self.free_slots.pop(), 0
        insort(self.running, sequence, key=_rank)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        self.pool.release_all(sequence.pages)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
