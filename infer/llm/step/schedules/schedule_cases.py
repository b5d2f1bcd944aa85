"""Schedules: the same tokens given to a step in every way in which an engine gives them, their logits collected.

A step that is right in one prefill may be wrong in the next call: a layer keeps state that is lost between calls, mixes
sequences of one call, counts places in the concatenated tokens instead of positions, or reads wrong pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .schedule_run import Call, Schedule, ScheduleRun

TOKENS = 72  # of the first window, two pages and a quarter
SHORTER = 45  # of the second
NEAR = 5  # tokens that are decoded on either side of the end of a page
LATE_CHUNK = 300  # tokens of a long window in one call
LATE_TOKENS = 24  # at its end, of which each is judged
CHUNKS = (3, 1, 14, 2, 29, 5, 11)  # tokens a chunk, over and over


def tokens(*new: tuple[int, int], last: bool = False) -> Call:
    """Return a call that gives each (sequence, tokens) so many more tokens."""
    return Call(new, last)


def prefill(play: ScheduleRun) -> Iterator[Call]:
    for index in range(len(play.sequences)):
        yield tokens((index, play.left(index)))


def _decode(play: ScheduleRun) -> Iterator[Call]:
    """Decode from nothing, across the end of each page and at the end of the text; read what lies between in chunks."""
    page = play.shape.page
    while left := play.left(0):
        inside = play.done[0] % page
        is_near = min(inside, page - inside, left) <= NEAR
        yield tokens((0, 1 if is_near else min(page - NEAR - inside, left - NEAR)))


def _chunks(play: ScheduleRun) -> Iterator[Call]:
    for count in itertools.cycle(CHUNKS):
        yield tokens((0, min(count, play.left(0))))
        if not play.left(0):
            return


def _together(play: ScheduleRun) -> Iterator[Call]:
    """Prefill beside decoding, either first in the call, both decoding, one waiting."""
    first, second = (play.left(i) for i in (0, 1))
    yield tokens((0, first // 4))
    for step in range(3):
        yield tokens((1, second // 4 - step), (0, 1))
    for _ in range(4):
        yield tokens((0, min(1, play.left(0))), (1, min(1, play.left(1))))
    yield tokens((0, play.left(0) // 3), (1, min(1, play.left(1))))
    yield tokens((1, play.left(1)), (0, play.left(0) // 2))
    yield tokens((0, play.left(0)))


def _preempted(play: ScheduleRun) -> Iterator[Call]:
    """Give the pages of the second sequence to the first; recompute it in others and decode beside it."""
    yield tokens((0, play.left(0) * 2 // 5))
    yield tokens((1, play.left(1) * 2 // 3))
    for _ in range(2):
        yield tokens((1, min(1, play.left(1))))
    again = play.done[1]
    play.release(1)
    yield tokens((0, max(play.left(0) - 6, 0)))
    yield tokens((1, again), (0, min(1, play.left(0))), last=True)
    for _ in range(4):
        yield tokens((0, min(1, play.left(0))), (1, min(1, play.left(1))))
    yield tokens((0, play.left(0)), (1, play.left(1)))


def _cached_prefix(play: ScheduleRun) -> Iterator[Call]:
    """Run a step whose second sequence reads cached pages of the first, while the first decodes."""
    yield tokens((0, play.left(0) - 5))
    play.share(1, 0)
    yield tokens((0, 1), (1, play.left(1) // 2))
    for _ in range(4):
        yield tokens((0, min(1, play.left(0))), (1, min(1, play.left(1))))
    yield tokens((1, play.left(1)))


def _drafts(play: ScheduleRun) -> Iterator[Call]:
    """Overwrite rejected draft tokens in the cache with the right ones."""
    yield tokens((0, play.left(0) // 3))
    for kept in (1, 3, 1, 2):
        ids = play.sequences[0].flip(0)[: min(4, play.left(0))]
        yield Call(((0, len(ids)),), last=True, draft=ids)
        yield tokens((0, min(kept, play.left(0))))
    yield tokens((0, play.left(0)))


def _late(play: ScheduleRun) -> Iterator[Call]:
    """Read a text in large chunks, of which the last token alone is judged, then a short one, then decode."""
    yield tokens((0, min(100, play.left(0))), last=True)
    while play.left(0) > LATE_CHUNK + LATE_TOKENS:
        yield tokens((0, LATE_CHUNK), last=True)
    yield tokens((0, play.left(0) - LATE_TOKENS), last=True)
    yield tokens((0, LATE_TOKENS // 2))
    while play.left(0):
        yield tokens((0, 1))


SCHEDULES = (
    Schedule("decode", "decoding across the ends of pages", (0,), _decode),
    Schedule("chunks", "prefill in uneven chunks", (0,), _chunks),
    Schedule("batch", "two sequences of different lengths in one step", (0, 1), _together),
    Schedule("preempted", "recomputing in other pages after a preemption", (0, 1), _preempted),
    Schedule("prefix", "reading a prefix from cached pages", (0, 0), _cached_prefix),
    Schedule("drafts", "decoding after rejected draft tokens", (0,), _drafts),
)
LATE = Schedule("late", "a long text in chunks", (0,), _late)
