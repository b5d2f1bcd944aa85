"""Outcome of a trial: its measurements, and why it was refused or lost."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from ... import fidelity
from ...errors import InferError, ResourceError
from ...latency import WORKLOAD, Paired
from ...report import document
from ...report.rendering import formatting
from ...report.search_record import Measured, Outcome
from ...run.trial import TimesToBeat, Trial
from ...run.trial_timing import LOST
from .messages import ToBeat


def outcome(error: InferError) -> Outcome:
    """Return the outcome that an error means."""
    if not isinstance(error, ResourceError):
        return "refused"
    return "disk full" if "disk" in error.message else "out of memory"


def sentence(error: InferError) -> str:
    """Return the error without the hints of `optimize`, which speak of its own options."""
    return f"{error.message} - at {error.where}" if error.where else error.message


def times_to_beat(to_beat: ToBeat) -> TimesToBeat:
    """Return the times of the best trial as the timing of a trial takes them."""
    return TimesToBeat(to_beat.ratios, to_beat.least)


def lost(trial: Trial, measured: Measured, to_beat: ToBeat) -> str:
    """Return why a timed trial can't win and is no member of the front: slower, no smaller, no more faithful."""
    slower = trial.times_slower(times_to_beat(to_beat))
    if slower is None or slower <= LOST:
        return ""
    if trial.size < to_beat.size or (measured.error or 0.0) < to_beat.error:
        return ""
    return f"{slower:.2g}x slower than {to_beat.label}, no smaller and no more faithful: not published"


def is_far(trial: Trial, to_beat: ToBeat | None) -> bool:
    """Return whether a trial is so much slower than another that it gets no artifact."""
    if to_beat is None or to_beat.far is None:
        return False
    slower = trial.times_slower(times_to_beat(to_beat))
    return slower is not None and slower > to_beat.far


LOST_SHARE, GAINED_SHARE = (
    0.5,
    2.0,
)  # of a difference of layers alone that shows in a model, at least and at most


def shown(difference: float) -> float:
    """Return the least difference of the times of two models whose layers alone differ by so many seconds."""
    return difference * (LOST_SHARE if difference > 0 else GAINED_SHARE)


def allowed_difference(slack: float) -> float:
    """Return how much longer layers may take alone so that `shown` of it is no more than `slack` seconds."""
    return slack / (LOST_SHARE if slack > 0 else GAINED_SHARE)


def gains_too_little(gain: Mapping[int, float], to_beat: ToBeat | None) -> str:
    """Return why a trial need not be lowered: its layers alone save too little at each batch size that counts."""
    if (
        to_beat is None
        or not gain
        or not to_beat.gain_needed
        or not to_beat.gain_needed.keys() <= gain.keys()
    ):
        return ""
    if any(-shown(-gain[batch]) >= needed for batch, needed in to_beat.gain_needed.items()):
        return ""
    batch, needed = min(to_beat.gain_needed.items())
    return (
        f"its layers alone take {formatting.seconds(abs(gain[batch]))} {'less' if gain[batch] > 0 else 'more'} than "
        f"in float at batch {batch}, {formatting.seconds(needed)} less are needed: slower than {to_beat.label}"
    )


def layers_too_slow(seconds: Mapping[int, float], most: Mapping[int, float], label: str) -> str:
    """Return why a trial can't come near the best one, `label`: its layers take too long alone at each batch size that
    counts.
    """
    if not most or not most.keys() <= seconds.keys() or any(seconds[batch] <= most[batch] for batch in most):
        return ""
    batch = min(most)
    return (
        f"its layers alone take {formatting.seconds(seconds[batch])} at batch {batch}, with "
        f"{formatting.seconds(max(0.0, most[batch]))} it would come near: slower than {label}"
    )


def measured(
    trial: Trial, layer_seconds: Mapping[int, float], layer_gain: Mapping[int, float] = MappingProxyType({})
) -> Measured:
    """Return what a trial measured before it is published; `layer_seconds`: of its layers alone, by batch size, and
    what they gain over float, where all were timed.
    """
    relative = [m.number for m in trial.fidelity if m.name == "relative_error"]
    known = [float(value) for value in relative if value is not None]
    drop = fidelity.drop(trial.fidelity, trial.task)
    return Measured(
        seconds={t.batch: t.pair.a.p50 for t in trial.latency},
        least={t.batch: t.pair.a.min for t in trial.latency},
        p99={t.batch: t.pair.a.p99 for t in trial.latency},
        ratios={t.batch: undisturbed_ratio(t.pair) for t in trial.latency},
        rivals={t.batch: t.rival for t in trial.latency},
        rival_seconds=trial.forms,
        layer_seconds=dict(layer_seconds),
        layer_gain=dict(layer_gain),
        first_token=_first_token(trial),
        size=trial.size,
        error=max(known, default=None),
        drop=drop if drop < float("inf") else None,
        slower=trial.slower,
    )


def undisturbed_ratio(pair: Paired) -> float:
    """Return the ratio of a pair; of one that a busy machine left undecided the ratio of the shortest calls.

    Disturbances only lengthen a call, so that the minimum bears them best (Chen and Revels 2016, "Robust benchmarking
    in noisy environments").
    """
    if pair.verdict != "within noise" or pair.a.min <= 0 or pair.b.min <= 0:
        return pair.ratio
    return pair.a.min / pair.b.min


def _first_token(trial: Trial) -> float | None:
    """Return the seconds that a language model takes to read the workload's prompt."""
    if trial.prompt is None:
        return None
    return trial.prompt.a.p50 * WORKLOAD.prompt / WORKLOAD.chunk


def published(measured: Measured, report: document.Report) -> Measured:
    """Return the measurements with those that the published artifact adds."""
    memory = report.memory
    return msgspec.structs.replace(
        measured,
        memory=None if memory is None else memory.gpu_peak or memory.peak,
        size=report.size,
        floor={row.batch: row.floor for row in report.latency if row.floor is not None},
        kv_bytes_per_token=None if report.cache is None else report.cache.bytes_per_token,
    )
