"""Requirements that the best trial so far sets for the next one: its times, and the least gain of a format's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from .. import plugins
from ..latency import FASTER
from ..report.search_record import Candidate, Measured, TrialRecord
from ..run.trial_timing import FAR, LOST
from . import space
from .known_trials import CLEARLY, TIMED, KnownTrials
from .space import BACKENDS
from .trial_process.messages import ToBeat
from .trial_process.trial_result import allowed_difference, gains_too_little, layers_too_slow

Seconds = Mapping[int, float]  # by batch size


def to_beat(known: KnownTrials, candidate: Candidate) -> ToBeat | None:
    """Return the best trial as the timing of a candidate needs it, its times as ratios to each float form.

    None where speed is not the objective, or where the user's own metric measures quality.
    """
    best, reference = known.best, known.reference_of(candidate)
    found = None if best is None else best.measured
    if best is None or found is None or known.budgets.aim not in TIMED or known.budgets.metric is not None:
        return None
    if found.size is None or found.error is None or not reference:
        return None
    least = known.cost(best)
    sizes = sorted(found.seconds)
    sizes = sizes[:1] if known.budgets.aim == "latency" else sizes
    limits = {size: least * (1 if known.budgets.aim == "latency" else size) for size in sizes}
    return ToBeat(
        label=best.candidate.label,
        ratios={
            form: {size: limit / seconds[size] for size, limit in limits.items() if size in seconds}
            for form, seconds in reference.items()
        },
        least={size: found.least[size] for size in sizes if size in found.least},
        size=found.size,
        error=found.error,
        far=None if known.memory_counts else FAR,
        gain_needed=_gain_needed(known, candidate, limits),
        most_layers=_most_layers(known, candidate, limits),
        own_layers=_own_layers(known, candidate, limits),
    )


def _gain_needed(known: KnownTrials, candidate: Candidate, limits: Seconds) -> dict[int, float]:
    """Return the seconds that quantized layers must save over float on their backend to come near `limits`, and to be
    noticed: the float form is no faster than the best trial.

    Only for runtimes of graphs: there what is between the layers is the same as in float, while the programs of fused
    native operators leave parts of it out.
    """
    own = known.float_trial(candidate)
    if own is None or not candidate.is_quantized or not plugins.get(BACKENDS, candidate.backend).PORTABLE:
        return {}
    times = known.typical(own)
    return {
        size: max(times[size] - CLEARLY * seconds, (1 - FASTER) * times[size])
        for size, seconds in limits.items()
        if size in times
    }


def _most_layers(known: KnownTrials, candidate: Candidate, limits: Seconds) -> dict[int, float]:
    """Return the seconds that the layers of a format may take alone so that it comes near `limits` on the candidate's
    backend or on one that calls the same operators; {} unless other formats were timed on each of them.
    """
    if not candidate.is_quantized or space.layers_as(candidate.backend) != candidate.backend:
        return {}
    every = space.backends(known.plan, known.budgets)
    names = [name for name in every if space.layers_as(name) == candidate.backend]
    allowed = [_allowed(known, candidate, name, limits) for name in names]
    return {size: max(one[size] for one in allowed) for size in limits} if allowed and all(allowed) else {}


def _own_layers(known: KnownTrials, candidate: Candidate, limits: Seconds) -> dict[int, float]:
    """Return the same for the candidate's backend alone, where its format runs on others too: there its fidelity is
    worth knowing.
    """
    if candidate.backend != known.first or not candidate.is_quantized:
        return {}
    return _allowed(known, candidate, candidate.backend, limits)


def _allowed(known: KnownTrials, candidate: Candidate, backend: str, limits: Seconds) -> dict[int, float]:
    """Return the seconds that the layers of a format may take alone so that it comes near `limits` on one backend, by
    the formats that were timed there; {} where none was.
    """
    found = {}
    for size, limit in limits.items():
        timed = list(_timed_formats(known, candidate, backend, size, limit))
        if not timed:
            return {}
        found[size] = min(min(alone + allowed_difference(slack), most) for slack, alone, most in timed)
    return found


def _timed_formats(
    known: KnownTrials, candidate: Candidate, backend: str, size: int, limit: float
) -> Iterator[tuple[float, float, float]]:
    """Yield for each format that was timed on a backend at a batch size how much longer it may take to be near `limit`,
    what its layers take alone, and what those of the candidate may take beside it: not clearly more where it is as
    small, and coarser than the best trial.

    Of the medians and the shortest calls those count that allow more: other processes lengthen medians.
    """
    best = (known.best.measured if known.best else None) or Measured()
    for record in known.records.values():
        if (record.candidate.backend, record.candidate.threads) == (backend, candidate.threads):
            times, alone = known.typical(record), known.layers_alone(record.candidate)
            if record.candidate.is_quantized and size in times and size in alone:
                slack, least = CLEARLY * limit - times[size], (record.measured or Measured()).least
                if size in least and size in best.least:
                    slack = max(slack, CLEARLY * best.least[size] - least[size])
                most = CLEARLY * alone[size] if _as_small(known, record.candidate, candidate) else math.inf
                yield slack, alone[size], most


def _as_small(known: KnownTrials, other: Candidate, candidate: Candidate) -> bool:
    """Return whether a format has no more bits than a candidate's, which has fewer than the best trial's: it can then
    win by speed alone, not by size or fidelity.
    """
    best = known.best
    sizes = {} if known.bounds is None else known.bounds.size
    own, others = sizes.get(candidate.quant, 0), sizes.get(other.quant, 0)
    if best is None or known.memory_counts or not own or not others or candidate.bits or other.bits:
        return False
    return own >= FASTER * others and sizes.get(best.candidate.quant, 0) > own


def still_holds(known: KnownTrials, record: TrialRecord) -> bool:
    """Return whether a recorded trial says enough for this search: what lost has to lose against the best of now,
    memory and size have to be known where they count.
    """
    if record.outcome == "skipped":
        return still_lost(known, record)
    return record.measured is None or record.measured.complete or not known.memory_counts


def _too_slow(seconds: Seconds, best: ToBeat) -> str:
    return layers_too_slow(seconds, best.own_layers or best.most_layers, best.label)


def still_lost(known: KnownTrials, record: TrialRecord) -> bool:
    """Return whether a trial that was skipped as slower than another would still lose against the best one."""
    best, found = to_beat(known, record.candidate), record.measured
    if best is None or found is None or known.best is None:
        return False
    if not found.seconds:
        return bool(gains_too_little(found.layer_gain, best) or _too_slow(found.layer_seconds, best))
    worse = (found.size or 0) >= best.size and (found.error or 0.0) >= best.error
    return worse and known.cost(record) > LOST * known.cost(known.best)
