"""Consistency of a scheduler: pages, table rows, states and counts against the sequences that hold them.

Tests and fuzzers check it after each step; it costs time in proportion to all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....errors import InferError
from ..sequence import Sequence
from .scheduler import Scheduler


def check_integrity(scheduler: Scheduler, live: Iterable[Sequence]) -> None:
    """Raise `InferError` when pages, sequences and counts do not agree; `live` are those of all requests in flight."""
    running, waiting = scheduler.running, scheduler.waiting
    scheduler.block_manager.check_integrity([[*s.pages, *s.source_pages] for s in running])
    if any(s.pages or s.source_pages or s.table_row >= 0 or s.state_row >= 0 for s in waiting):
        raise InferError("a waiting sequence holds pages or a state")
    if scheduler.state_rows is not None:
        scheduler.state_rows.check_integrity(running)
    if {id(s) for s in live} != {id(s) for s in (*running, *waiting)}:
        raise InferError("the scheduler and the requests in flight differ")
    _check_rows(scheduler)
    page = scheduler.block_manager.page_size
    if any(len(s.pages) * page < s.num_computed_tokens for s in running):
        raise InferError("a sequence has fewer pages than tokens")


def _check_rows(scheduler: Scheduler) -> None:
    rows = [sequence.table_row for sequence in scheduler.running]
    if len(set(rows)) != len(rows) or len(rows) + len(scheduler.free_rows) != scheduler.limits.max_running:
        raise InferError("a row of the block table is missing or taken twice")
