"""Schedules: the same tokens given to a step in every way in which an engine gives them, their logits collected.

A step that is right in one prefill may be wrong in the next call: a layer keeps state that is lost between calls, mixes
sequences of one call, counts places in the concatenated tokens instead of positions, or reads wrong pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .schedule_run import ScheduleRun

TOKENS = 72  # of the first window, two pages and a quarter
SHORTER = 45  # of the second
NEAR = 5  # tokens that are decoded on either side of the end of a page
LATE_CHUNK = 300  # tokens of a long window in one call
LATE_TOKENS = 24  # at its end, of which each is judged
CHUNKS = (3, 1, 14, 2, 29, 5, 11)  # tokens a chunk, over and over


@dataclass(frozen=True)
class Schedule:
    """One way to compute sequences. `sequences`: the window of each sequence that is played."""

    name: str
    words: str
    sequences: tuple[int, ...]
    play: Callable[[ScheduleRun], None]


def prefill(play: ScheduleRun) -> None:
    for index in range(len(play.sequences)):
        play.step((index, play.left(index)))


def _decode(play: ScheduleRun) -> None:
    """Decode from nothing, across the end of each page and at the end of the text; read what lies between in chunks."""
    page = play.shape.page
    while left := play.left(0):
        inside = play.done[0] % page
        is_near = min(inside, page - inside, left) <= NEAR
        play.step((0, 1 if is_near else min(page - NEAR - inside, left - NEAR)))


def _chunks(play: ScheduleRun) -> None:
    for count in _uneven():
        play.step((0, min(count, play.left(0))))
        if not play.left(0):
            return


def _together(play: ScheduleRun) -> None:
    """Prefill beside decoding, either first in the call, both decoding, one waiting."""
    first, second = (play.left(i) for i in (0, 1))
    play.step((0, first // 4))
    for step in range(3):
        play.step((1, second // 4 - step), (0, 1))
    for _ in range(4):
        play.step((0, min(1, play.left(0))), (1, min(1, play.left(1))))
    play.step((0, play.left(0) // 3), (1, min(1, play.left(1))))
    play.step((1, play.left(1)), (0, play.left(0) // 2))
    play.step((0, play.left(0)))


def _preempted(play: ScheduleRun) -> None:
    """Give the pages of the second sequence to the first; recompute it in others and decode beside it."""
    play.step((0, play.left(0) * 2 // 5))
    play.step((1, play.left(1) * 2 // 3))
    for _ in range(2):
        play.step((1, min(1, play.left(1))))
    again = play.done[1]
    play.release(1)
    play.step((0, max(play.left(0) - 6, 0)))
    play.step((1, again), (0, min(1, play.left(0))), last=True)
    for _ in range(4):
        play.step((0, min(1, play.left(0))), (1, min(1, play.left(1))))
    play.step((0, play.left(0)), (1, play.left(1)))


def _cached_prefix(play: ScheduleRun) -> None:
    """Run a step whose second sequence reads cached pages of the first, while the first decodes."""
    play.step((0, play.left(0) - 5))
    play.share(1, 0)
    play.step((0, 1), (1, play.left(1) // 2))
    for _ in range(4):
        play.step((0, min(1, play.left(0))), (1, min(1, play.left(1))))
    play.step((1, play.left(1)))


def _drafts(play: ScheduleRun) -> None:
    """Overwrite rejected draft tokens in the cache with the right ones."""
    play.step((0, play.left(0) // 3))
    for kept in (1, 3, 1, 2):
        play.draft(0, play.sequences[0].flip(0)[: min(4, play.left(0))])
        play.step((0, min(kept, play.left(0))))
    play.step((0, play.left(0)))


def _late(play: ScheduleRun) -> None:
    """Read a text in large chunks, of which the last token alone is judged, then a short one, then decode."""
    play.step((0, min(100, play.left(0))), last=True)
    while play.left(0) > LATE_CHUNK + LATE_TOKENS:
        play.step((0, LATE_CHUNK), last=True)
    play.step((0, play.left(0) - LATE_TOKENS), last=True)
    play.step((0, LATE_TOKENS // 2))
    while play.left(0):
        play.step((0, 1))


def _uneven() -> Iterator[int]:
    while True:
        yield from CHUNKS


SCHEDULES = (
    Schedule("decode", "decoding across the ends of pages", (0,), _decode),
    Schedule("chunks", "prefill in uneven chunks", (0,), _chunks),
    Schedule("batch", "two sequences of different lengths in one step", (0, 1), _together),
    Schedule("preempted", "recomputing in other pages after a preemption", (0, 1), _preempted),
    Schedule("prefix", "reading a prefix from cached pages", (0, 0), _cached_prefix),
    Schedule("drafts", "decoding after rejected draft tokens", (0,), _drafts),
)
LATE = Schedule("late", "a long text in chunks", (0,), _late)
