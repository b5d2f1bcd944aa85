"""The last round of a search for speed: the trials nearest to the best one, timed in turns with each other.

Costs of trials are ratios to float forms, taken minutes apart: on a busy machine a float form that stalled makes a
trial seem fast. The few that may be the best are timed once more, all of them in each round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ..latency import decide
from ..report import search_tables
from ..report.search_record import Candidate, InTurns, Measured, TrialRecord
from ..reporter import Reporter
from ..spec import Finding
from .feasibility import eligible
from .known_trials import TIMED, KnownTrials
from .trial_process.worker_process import RoundTimes, TrialEndedError

NEAR = 1.5  # times the least cost: within it the order of costs may be the machine's
MOST = 6  # all of them are open at once
UNCERTAIN = 1.05  # high over low of an interval from which on its median is not believed
UNDISTURBED = 0.1  # quantile of the rounds that counts then
Rounds = Callable[[Candidate, Sequence[Path], Sequence[int]], RoundTimes]  # see `Worker.rounds`


def nearest(known: KnownTrials) -> list[TrialRecord]:
    """Return the trials that may be the best for an objective of speed, the best so far first; of its threads alone."""
    best = known.best
    if best is None or known.budgets.aim not in TIMED:
        return []
    near = {
        r.candidate: distance
        for r in known.records.values()
        if r.candidate.threads == best.candidate.threads
        and eligible(r, known.limits, known.budgets, known.plan)
        and (distance := _distance(known, r, best)) <= NEAR
    }
    ranked = sorted(near, key=lambda one: (one != best.candidate, near[one]))
    return [known.records[one] for one in ranked[:MOST]]


def _distance(known: KnownTrials, record: TrialRecord, best: TrialRecord) -> float:
    """Return how many times the best one's time a trial takes: by cost or by shortest calls, whichever says less."""
    by_cost = known.cost(record) / known.cost(best)
    own, other = (known.of_row((r.measured or Measured()).least) for r in (record, best))
    return by_cost if math.inf in (own, other) else min(by_cost, own / other)


def compare(
    known: KnownTrials, artifacts: Mapping[Candidate, Path], rounds: Rounds, reporter: Reporter
) -> list[TrialRecord]:
    """Time the nearest trials whose artifacts are here in turns; return their records with what was found.

    There are none where fewer than two are near, where an earlier search timed all of them in one round, and where the
    question fails: then the order of costs stays. A finding names those that are near but have no artifact here: trials
    of other nodes, and of an earlier search whose artifacts are gone.
    """
    near = nearest(known)
    if all(r.from_journal and r.turns for r in near) and len({r.turns.against for r in near if r.turns}) == 1:
        return []
    found = [record for record in near if record.candidate in artifacts]
    if absent := [record.candidate.label for record in near if record.candidate not in artifacts]:
        why = f"without {', '.join(absent)}: no artifact here, so that the times of the trial itself count"
        reporter.found([Finding("search", "the best trials in turns", None, why=why)])
    if len(found) < 2:
        return []
    reporter.step("time", f"in turns: {', '.join(record.candidate.label for record in found)}")
    places = [artifacts[record.candidate] for record in found]
    batches = [_batch(record, known.budgets.aim) for record in found]
    try:
        seconds = rounds(found[0].candidate, places, batches)
    except TrialEndedError as ended:
        failed = f"{ended}; the order is that of the trials alone"
        reporter.found([Finding("search", "the best trials in turns", None, why=failed)])
        return []
    turns = standings([record.candidate.label for record in found], seconds)
    turns = [msgspec.structs.replace(one, aim=known.budgets.aim) for one in turns]
    return [msgspec.structs.replace(one, turns=own) for one, own in zip(found, turns, strict=True)]


def _batch(record: TrialRecord, aim: str) -> int:
    """Return the batch size that the objective measures: the smallest one, or that of the best throughput."""
    seconds = (record.measured or Measured()).seconds
    return min(seconds) if aim == "latency" else min(seconds, key=lambda size: seconds[size] / size)


def standings(names: Sequence[str], seconds: Sequence[Sequence[float]]) -> list[InTurns]:
    """Compare all with the fastest one, from seconds by name and round.

    The ratio is the median over rounds. Where the machine left that uncertain it is the ratio of both lower deciles:
    disturbances only lengthen calls (Chen and Revels 2016, "Robust benchmarking in noisy environments"), and a decile
    does not hang on one lucky round as the shortest does.
    """
    if not seconds or not seconds[0]:
        raise ValueError("expected at least one round")
    fastest = 0
    for index in range(1, len(names)):
        if _ratio(seconds[index], seconds[fastest]).ratio < 1:
            fastest = index
    found = [_ratio(own, seconds[fastest], names[fastest]) for own in seconds]
    return [
        msgspec.structs.replace(one, ratio=1.0) if index == fastest else one
        for index, one in enumerate(found)
    ]


def _ratio(own: Sequence[float], other: Sequence[float], name: str = "") -> InTurns:
    ratio, low, high, verdict = decide([a / b for a, b in zip(own, other, strict=True)])
    if high > UNCERTAIN * low:
        ratio = float(np.quantile(own, UNDISTURBED) / np.quantile(other, UNDISTURBED))
    return InTurns(against=name, ratio=ratio, low=low, high=high, rounds=len(own), verdict=verdict)


def confidence(records: Sequence[TrialRecord], best: Candidate) -> str:
    """Say how sure the choice of the best is, from the trials timed in turns with it; "" without any."""
    turns = next((r.turns for r in records if r.candidate == best), None)
    if turns is None:
        return ""
    group = [r for r in records if r.turns is not None and r.turns.against == turns.against]
    return "; ".join(f"{r.candidate.label} {text}" for r in group if (text := search_tables.in_turns(r)))
