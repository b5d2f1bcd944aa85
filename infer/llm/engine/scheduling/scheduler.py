"""Scheduler of the engine: decodes first, then chunks of prompts, within a budget of tokens and pages per step.

Requests of one tenant are ordered by rank (arrival, shifted by priority; see `RequestState`), tenants by the tokens
they were served (see `fairness`). Progress is certain: the oldest of the requests that come first for their tenants
can preempt all others, and an admitted request fits into the cache alone, so no two preempt each other in turns.
"""

from __future__ import annotations

import itertools
from bisect import insort

from ..cache.block_manager import BlockManager
from ..cache.sequence_pages import SequencePages
from ..cache.state_rows import StateRows
from ..sequence import Rank, ScheduledSequence, Sequence
from .engine_limits import EngineLimits
from .fairness import OLDEST_EVERY, FairShares, arrival_order


class Scheduler:
    """Queues of waiting and running sequences, both in order of rank, and the choice of what runs in a step."""

    def __init__(
        self, block_manager: BlockManager, limits: EngineLimits, state_rows: StateRows | None = None
    ) -> None:
        self.block_manager, self.limits, self.state_rows = block_manager, limits, state_rows
        self.pages = SequencePages(block_manager, limits, state_rows)
        self.fair_shares = FairShares()
        self.waiting: list[Sequence] = []  # both in order of rank
        self.running: list[Sequence] = []
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self.free_rows = list(range(limits.max_running - 1, -1, -1))
        self._turn = 0
        self._reserve = max(1, int(block_manager.num_pages * limits.watermark))

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.fair_shares.on_arrival(sequence.tenant, itertools.chain(self.waiting, self.running))
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out a finished sequence, waiting or running; its pages are free at once."""
        if sequence.table_row >= 0:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` where `parent` is, over the same pages; without a free row it waits and recomputes."""
        if not self.free_rows:
            self.add(child)
            return
        self.pages.fork(parent, child)
        self._start_running(child)

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the sequences and tokens of the next step and allocate their pages; [] if there is nothing to run."""
        self._preempt_for_waiting()
        scheduled = (
            self._schedule_batch_invariant() if self.limits.batch_invariant else self._schedule_batched()
        )
        for item in scheduled:
            tokens = item.num_tokens + item.sequence.source_left
            self.fair_shares.charge(item.sequence, tokens, output=item.is_decode)
        return scheduled

    def _schedule_batched(self) -> list[ScheduledSequence]:
        scheduled = self._schedule_decodes()
        budget = self.limits.step_tokens - sum(item.num_tokens for item in scheduled)
        if scheduled:
            budget = min(budget, self.limits.mixed_tokens)
        if budget > 0:
            scheduled += self._schedule_prefills(budget)
        return scheduled

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        decoding = [s for s in self.running if len(s.tokens) - s.num_computed_tokens == 1 and s.source_ready]
        budget = self.limits.step_tokens
        spare = budget - len(decoding)
        page, refs = self.block_manager.page_size, self.block_manager.ref_counts
        for sequence in decoding[:budget]:
            if sequence.table_row < 0:
                continue  # lost its pages to one before it
            block = sequence.num_computed_tokens // page
            if not sequence.draft_tokens and block < len(sequence.pages) and refs[sequence.pages[block]] == 1:
                scheduled.append(ScheduledSequence(sequence, 1))
                continue
            draft = len(sequence.draft_tokens)
            if draft and (
                draft > spare or not self.pages.has_room(sequence, sequence.num_computed_tokens + 1 + draft)
            ):
                del sequence.draft_tokens[max(spare, 0) :]
                if not self.pages.has_room(
                    sequence, sequence.num_computed_tokens + 1 + len(sequence.draft_tokens)
                ):
                    sequence.draft_tokens = []
            if self._ensure_room(sequence, sequence.num_computed_tokens + 1 + len(sequence.draft_tokens)):
                scheduled.append(ScheduledSequence(sequence, 1 + len(sequence.draft_tokens)))
                spare -= len(sequence.draft_tokens)
        return scheduled

    def _schedule_prefills(self, budget: int) -> list[ScheduledSequence]:
        """Divide the budget: a quarter to the oldest prompt, the rest by tenant and then shortest first."""
        waiting = self._admit_prefills()
        if not waiting:
            return []
        counts: dict[int, int] = {}
        scored = self.limits.score_tokens
        most = budget
        order = [min(waiting, key=arrival_order)]
        if len(waiting) > 1:
            order += sorted(waiting, key=self.fair_shares.prefill_key)
        for i, sequence in enumerate(order):
            self.prefix_hits += self.pages.use_cached(sequence)
            left = len(sequence.tokens) - sequence.num_computed_tokens - counts.get(sequence.table_row, 0)
            limit = budget if i or len(order) == 1 else max(budget // OLDEST_EVERY, 1)
            count = min(left, limit, budget)
            if sequence.source_left and sequence.table_row not in counts:
                # The whole source is encoded in one step: in this one where it fits the budget, or in a later one.
                if budget < min(most, sequence.source_left + 1):
                    continue
                budget -= min(sequence.source_left, budget - count)
            if sequence.state.needs_prompt_logprobs:
                count = min(count, scored)
                scored -= count
            counts[sequence.table_row] = counts.get(sequence.table_row, 0) + count
            budget -= count
        return [ScheduledSequence(s, counts[s.table_row]) for s in waiting if counts.get(s.table_row)]

    def _admit_prefills(self) -> list[Sequence]:
        """Return the running prefills by rank after admitting waiting ones; of each tenant at least one."""
        found = [s for s in self.running if len(s.tokens) - s.num_computed_tokens > 1 or not s.source_ready]
        while self.waiting:
            first = self.fair_shares.next_to_admit(self.waiting)
            if len(found) >= self.limits.max_prefills and any(s.tenant == first.tenant for s in found):
                break
            if not self._can_admit(first, hits := self.pages.match_prefix(first)):
                break
            self._admit(first, hits)
            insort(found, first, key=_rank)
        return found

    def _preempt_for_waiting(self) -> None:
        """Preempt for the first waiting sequence while its share or priority allows it and room is missing."""
        while self.waiting and self.running:
            first = self.fair_shares.next_to_admit(self.waiting)
            lacking = self._num_missing_pages(first, self.pages.match_prefix(first))
            if self.free_rows and lacking <= 0:
                return
            if (victim := self.fair_shares.victim_for(first, self.running, lacking)) is None:
                return
            self.preempt(victim)

    def _can_admit(self, sequence: Sequence, hits: list[int]) -> bool:
        return bool(self.free_rows) and self._num_missing_pages(sequence, hits) <= 0

    def _num_missing_pages(self, sequence: Sequence, hits: list[int]) -> int:
        """Count the pages that the sequence needs beyond the available ones, the reserve included."""
        reserve = self._reserve if self.running else 0
        return self.pages.num_needed(sequence, hits) + reserve - self.block_manager.num_available

    def _admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Give the first waiting sequence a row, and pages for all its tokens."""
        self.pages.admit(sequence, hits)
        self.prefix_queries += len(sequence.tokens)
        self.prefix_hits += sequence.num_cached_tokens
        self.waiting.remove(sequence)
        self.fair_shares.on_admission(sequence)
        self._start_running(sequence)

    def _ensure_room(self, sequence: Sequence, length: int) -> bool:
        """Allocate pages for `length` tokens, preempting others; False when the sequence itself was preempted."""
        if self.pages.fits(sequence, length):
            return True
        while not self.pages.has_room(sequence, length):
            last = self.fair_shares.next_to_preempt(self.running)
            self.preempt(last)
            if last is sequence:
                return False
        self.pages.grow(sequence, length)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Release the pages of a running sequence; it waits by its rank and is recomputed."""
        self._stop_running(sequence)
        sequence.num_computed_tokens = 0
        sequence.draft_tokens = []
        insort(self.waiting, sequence, key=_rank)
        self.preemptions += 1

    def advance(self, sequence: Sequence, count: int) -> None:
        """Count `count` more tokens as computed, with their state; add full pages to the prefix cache."""
        page = self.block_manager.page_size
        before = sequence.num_computed_tokens // page
        sequence.num_computed_tokens += count
        if sequence.num_computed_tokens // page > before and self.block_manager.prefix_caching:
            self.pages.register(sequence, before)
        if self.state_rows is not None:
            self.state_rows.commit(sequence)

    def _schedule_batch_invariant(self) -> list[ScheduledSequence]:
        """Schedule every decode and a chunk of one prompt: the shortest, every few steps the oldest.

        Outputs that are recomputed after a preemption run one by one, as they did the first time.
        """
        self._admit_prefills()
        scheduled: list[ScheduledSequence] = []
        reading: list[Sequence] = []
        for sequence in list(self.running):
            if (
                sequence.num_computed_tokens < sequence.state.prompt_length
                and sequence.num_computed_tokens + 1 < len(sequence.tokens)
            ):
                reading.append(sequence)
            elif sequence.table_row >= 0 and self._ensure_room(sequence, sequence.num_computed_tokens + 1):
                scheduled.append(ScheduledSequence(sequence, 1))
        reading = [sequence for sequence in reading if sequence.table_row >= 0]
        if reading:
            self._turn += 1
            order = arrival_order if self._turn % OLDEST_EVERY == 0 else self.fair_shares.prefill_key
            sequence = min(reading, key=order)
            piece = self.limits.step_tokens
            end = min((sequence.num_computed_tokens // piece + 1) * piece, sequence.state.prompt_length)
            scheduled.append(ScheduledSequence(sequence, end - sequence.num_computed_tokens))
        return scheduled

    def _start_running(self, sequence: Sequence) -> None:
        sequence.table_row, sequence.num_synced_pages = self.free_rows.pop(), 0
        insort(self.running, sequence, key=_rank)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free_rows.append(sequence.table_row)
        sequence.table_row = -1
        self.pages.release_all(sequence)


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
