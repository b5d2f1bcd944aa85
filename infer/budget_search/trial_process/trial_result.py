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
from ...run.trial import Trial
from ...run.trial_timing import LOST
from .messages import ToBeat

Seconds = Mapping[int, float]  # by batch size


def outcome(error: InferError) -> Outcome:
    """Return the outcome that an error means."""
    if not isinstance(error, ResourceError):
        return "refused"
    return "disk full" if "disk" in error.message else "out of memory"


def sentence(error: InferError) -> str:
    """Return the error without the hints of `optimize`, which speak of its own options."""
    return f"{error.message} - at {error.where}" if error.where else error.message


def lost(trial: Trial, measured: Measured, to_beat: ToBeat) -> str:
    """Return why a timed trial can't win and is no member of the front: slower, no smaller, no more faithful."""
    slower = trial.times_slower(to_beat.times)
    if slower is None or slower <= LOST:
        return ""
    if trial.size < to_beat.size or (measured.error or 0.0) < to_beat.error:
        return ""
    return f"{slower:.2g}x slower than {to_beat.label}, no smaller and no more faithful: not published"


def is_far(trial: Trial, to_beat: ToBeat | None) -> bool:
    """Return whether a trial is so much slower than another that it gets no artifact."""
    if to_beat is None or to_beat.far is None:
        return False
    slower = trial.times_slower(to_beat.times)
    return slower is not None and slower > to_beat.far


def lost_by_layers(seconds: Seconds, gain: Seconds, to_beat: ToBeat) -> str:
    """Return why a trial can't come near the best one by what its layers take alone and gain over float; "" where it
    may, or where not all were timed, so that their gain is not known.
    """
    least = to_beat.least_gain
    if least and least.keys() <= gain.keys() and all(gain[batch] < least[batch] for batch in least):
        batch, needed = min(least.items())
        return (
            f"its layers alone take {formatting.seconds(abs(gain[batch]))} "
            f"{'less' if gain[batch] > 0 else 'more'} than in float at batch {batch}, with "
            f"{formatting.seconds(needed)} less it would come near: slower than {to_beat.label}"
        )
    return layers_too_slow(seconds, to_beat.most_layers, to_beat.label) if gain else ""


def layers_too_slow(seconds: Seconds, most: Seconds, label: str) -> str:
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


def measured(trial: Trial, layer_seconds: Seconds, layer_gain: Seconds = MappingProxyType({})) -> Measured:
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
    return pair.undisturbed().ratio if pair.verdict == "within noise" else pair.ratio


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
