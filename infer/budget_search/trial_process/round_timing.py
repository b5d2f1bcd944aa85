"""Times of several artifacts in turns: what the machine does besides meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

from ... import latency
from ...artifact import store
from ...graph.program import Graph
from ...predict.open_artifact import backend_of
from ...predict.predictor import open_runner
from ...run.trial_timing import call_of

LEAST_ROUNDS, MOST_ROUNDS, MOST_SECONDS = 21, 200, 3.0  # seconds for each artifact


def time_artifacts(
    folders: Sequence[Path],
    batches: Sequence[int],
    graph: Graph,
    timing: Callable[[], AbstractContextManager[object]],
) -> list[list[float]]:
    """Open artifacts that this process published and time a call of each, at its own batch size, on samples of `graph`.

    Seconds are those of one row. All of them are in memory at once.
    """
    with ExitStack() as open_now:
        calls = []
        for folder, batch in zip(folders, batches, strict=True):
            manifest = store.read_manifest(folder)
            runner = open_runner(backend_of(manifest, folder), folder, manifest, manifest.device)
            open_now.enter_context(closing(runner))
            calls.append(call_of(runner, graph, batch, served=True))
        device = manifest.device
        with timing():
            rounds = in_rounds(calls, device=device)
    return [[one / batch for one in taken] for taken, batch in zip(rounds, batches, strict=True)]


def in_rounds(
    calls: Sequence[Callable[[], Any]],
    *,
    device: str = "cpu",
    clock: latency.Clock = time.perf_counter,
) -> list[list[float]]:
    """Return seconds by call and round; each round runs every call, in another order than the round before.

    Calls below `latency.TURN` are repeated within a round, and their median counts. There are `LEAST_ROUNDS` at least,
    and as many as `MOST_SECONDS` for each call allow.
    """
    for call in calls:
        latency.warm_up(call, device, clock)
    repeats = [latency.num_repeats(latency.timed(call, device, clock)) for call in calls]
    taken: list[list[float]] = [[] for _ in calls]
    start, order = clock(), list(range(len(calls)))
    with latency.no_collection():
        while len(taken[0]) < MOST_ROUNDS:
            for index in order:
                taken[index].append(
                    statistics.median(latency.turn(calls[index], repeats[index], device, clock))
                )
            order = [*order[1:], order[0]] if len(taken[0]) % 2 else order[::-1]
            if len(taken[0]) >= LEAST_ROUNDS and clock() - start >= MOST_SECONDS * len(calls):
                break
    return taken
