"""Bounds on what a candidate can reach: one that can't win is skipped, with the bound as the reason."""

from __future__ import annotations

from collections.abc import Mapping

from .. import device, plugins
from ..budgets import Budgets
from ..errors import GateError
from ..latency import FASTER, SLOWER
from ..report.rendering import formatting
from ..report.search_record import Candidate, Measured, TrialRecord
from . import feasibility
from .known_trials import CLEARLY, TIMED, KnownTrials, SameLayers
from .space import BACKENDS, eager_twin
from .trial_process.trial_result import shown

# The most that a format or dtype gains over float32 on one backend: twice the bytes it saves, or twice the products of
# its units (4 times those of float32 with VNNI, 16 times with AMX), for float forms that reach half of their peak.
GAIN = {"float": 4.0, "int8": 8.0, "fp8": 8.0}
MOST_GAIN = 16.0
TILES_GAIN = 4.0  # more with AMX
VARIANT_GAIN = 4.0  # of other KV types, dtypes and calibrations of a format that was measured
NO_FASTER = (
    0.9  # times the layers of another format of its size: times of layers alone differ so much by noise
)
HALF = ("bfloat16", "float16")
QUALITY = ("--max-error", "--max-drop", "--min-score")


def why_skip(known: KnownTrials, candidate: Candidate) -> str:
    """Return the bound that says that a candidate can't win, or "" where none does."""
    if known.generates and not plugins.get(BACKENDS, candidate.backend).STEPS:
        return f"{candidate.backend} has no attention over a paged KV cache and can't generate"
    return (
        _too_large(known, candidate)
        or _above_roofline(known, candidate)
        or _float_failed(known, candidate)
        or _unfaithful(known, candidate)
        or _too_slow(known, candidate)
        or _slower_layers(known, candidate)
        or _no_better_layers(known, candidate)
    )


def _too_large(known: KnownTrials, candidate: Candidate) -> str:
    """Compare the bytes of the packed weights, and of the cache, with the budgets."""
    size = least_bytes(known, candidate)
    read = _bound(candidate, {} if known.bounds is None else known.bounds.read)
    if known.budgets.max_size is not None and size > known.budgets.max_size:
        return f"its weights alone take {formatting.size(round(size))}: above --max-size"
    if known.budgets.max_memory is not None and read > known.budgets.max_memory:
        return f"its weights alone take {formatting.size(round(read))} of memory: above --max-memory"
    return ""


def least_bytes(known: KnownTrials, candidate: Candidate) -> float:
    """Return the bytes below which no artifact of a candidate can be; 0 where that is not known."""
    return _bound(candidate, {} if known.bounds is None else known.bounds.size)


def nothing_fits(known: KnownTrials) -> GateError:
    """Make the error of a search without a winner: the nearest trials, of those not run the smallest first."""
    records = sorted(known.records.values(), key=lambda one: least_bytes(known, one.candidate))
    skipped = sum(record.outcome == "skipped" for record in records)
    return feasibility.nothing_fits(records, known.limits, known.budgets, skipped=skipped)


def _bound(candidate: Candidate, by_format: Mapping[str, float]) -> float:
    """Return the bound of a candidate's format, or of its mean bits; 0 where none is known."""
    if candidate.drop:
        return 0.0
    value = by_format.get(candidate.quant, 0.0)
    value *= 1.0 if candidate.bits is None else candidate.bits / 32
    return value / 2 if candidate.dtype in HALF else value


def _above_roofline(known: KnownTrials, candidate: Candidate) -> str:
    """Compare the roofline of the format with the budgets of time and with the best trial."""
    half = candidate.dtype in HALF  # whose peak is another one
    seconds = {} if known.bounds is None or half else known.bounds.seconds
    least_seconds = {
        batch: _bound(candidate, {name: by[batch] for name, by in seconds.items() if batch in by})
        for batch in sorted({batch for by in seconds.values() for batch in by})
    }
    if not least_seconds or not all(least_seconds.values()):
        return ""
    first = least_seconds[min(least_seconds)]
    rate = max(batch / value for batch, value in least_seconds.items())
    said = f"the roofline of this machine allows no call under {formatting.seconds(first)}"
    budgets = known.budgets
    for flag, limit in (("--max-latency", budgets.max_latency), ("--max-p99", budgets.max_p99)):
        if limit is not None and first > limit:
            return f"{said}: above {flag}"
    if budgets.min_throughput is not None and rate < budgets.min_throughput:
        return f"{said}, {rate:,.0f} rows per second: below --min-throughput"
    best = known.best
    if best is None or budgets.aim not in TIMED:
        return ""
    reachable = first if budgets.aim == "latency" else 1 / rate
    slower = reachable > max(known.cost(best), _seconds(best, known.budgets)) * SLOWER
    return f"{said}: slower than {best.candidate.label}" if slower else ""


def _seconds(record: TrialRecord, budgets: Budgets) -> float:
    """Return the measured seconds per row of a trial, to compare with a roofline.

    Its cost can't be: that is in relation to a float form, which a busy machine may have delayed more than the trial.
    """
    found = record.measured or Measured()
    if budgets.aim == "latency":
        return found.latency or 0.0
    return 1 / found.throughput if found.throughput else 0.0


def _float_failed(known: KnownTrials, candidate: Candidate) -> str:
    """Compare with the float trial of the same backend: where that failed, a format fails too."""
    own = known.float_trial(candidate)
    if candidate.is_float or own is None or own.outcome in ("published", "skipped"):
        return ""
    return f"{own.candidate.label}: {own.outcome}, {own.reason}"


def _unfaithful(known: KnownTrials, candidate: Candidate) -> str:
    """Compare with the fidelity of the format, measured once: every backend decodes the same weights."""
    twin = known.records.get(eager_twin(candidate, known.first))
    if twin is None or twin.measured is None or candidate.backend == known.first:
        return ""
    if not twin.measured.faithful:
        return f"{twin.candidate.label}: {twin.reason}"
    judged = [x for x in known.limits if x.flag in QUALITY and x.of(twin.measured) is not None]
    missed = [x for x in judged if x.excess(twin.measured) > 1]
    return f"{twin.candidate.label} would need {missed[0].needed(twin.measured)}" if missed else ""


def _too_slow(known: KnownTrials, candidate: Candidate) -> str:
    """Compare a timed trial of the backend, divided by the largest gain of the candidate, with budget and best trial.

    The timed trial is one of the same format, else the float form. The float form of `known.first` (plain torch) is no
    bound, because quantized models run on fused operators there.
    """
    own = _variant_of(known, candidate)
    gain, kind = VARIANT_GAIN, "a variant of it"
    if own is None and candidate.backend != known.first:
        own, gain, kind = known.float_trial(candidate), _gain(candidate), "a format"
    if candidate.is_float or own is None or own.measured is None or not own.measured.seconds:
        return ""
    times = known.typical(own)
    batch = min(times)
    bound = times[batch] / gain
    least = f"{own.candidate.label} takes {formatting.seconds(times[batch])}, {kind} gains at most {gain:g}x"
    if known.budgets.max_latency is not None and bound > known.budgets.max_latency:
        return f"{least}: above --max-latency"
    best = known.best
    if best is None or best.measured is None or known.budgets.aim not in TIMED:
        return ""
    reachable = bound if known.budgets.aim == "latency" else min(s / size for size, s in times.items()) / gain
    if reachable > known.cost(best) * SLOWER:
        return f"{least}: slower than {best.candidate.label}"
    return ""


def _slower_layers(known: KnownTrials, candidate: Candidate) -> str:
    """Compare a timed trial of another format on the same backend, corrected by what the layers of both take alone.

    Only on a backend whose layers call the operators of another one (`LAYERS_AS`), where both formats were timed: what
    is between the layers is the same then.
    """
    best = known.best
    if best is None:
        return ""
    for other in known.same_layers(candidate):
        least = {
            batch: other.times[batch] + shown(other.own[batch] - other.alone[batch]) for batch in other.times
        }
        if (known.per_row(least) or 0.0) > known.cost(best) * CLEARLY and _shortest_agree(known, other, best):
            return f"{_said(other)}: slower than {best.candidate.label}"
    return ""


def _shortest_agree(known: KnownTrials, other: SameLayers, best: TrialRecord) -> bool:
    """Return whether the shortest calls of the timed trial and of the best one say the same, where both are known.

    A trial that another process held up has a median of twice its own time, while its rival may have been spared.
    """
    shortest, limits = (one.measured.least if one.measured else {} for one in (other.record, best))
    if not all(size in shortest and size in limits for size in other.times):
        return True
    least = {size: shortest[size] + shown(other.own[size] - other.alone[size]) for size in other.times}
    limit = known.per_row({size: limits[size] for size in other.times}) or 0.0
    return (known.per_row(least) or 0.0) > limit * CLEARLY


def _no_better_layers(known: KnownTrials, candidate: Candidate) -> str:
    """Compare with a timed trial of another format on the same backend whose layers are no slower and no larger.

    Both call the operators of one backend, so that the candidate could win by noise alone, or by being more faithful.
    Layers of formats of one size differ by noise: those of a more faithful one have to be clearly slower.
    """
    best, own = known.best, _twin_measured(known, candidate)
    if best is None or own is None or known.memory_counts or not candidate.is_quantized:
        return ""
    for other in known.same_layers(candidate):
        found = _twin_measured(known, other.record.candidate) or Measured()
        if own.size is None or found.size is None or own.size < found.size * FASTER:
            continue
        ratio = (known.per_row(other.own) or 0.0) / (known.per_row(other.alone) or 1.0)
        coarser = own.error is not None and found.error is not None and own.error >= found.error
        if (
            ratio >= (NO_FASTER if coarser else CLEARLY)
            and known.cost(other.record) > known.cost(best) * FASTER
        ):
            return f"{_said(other)}, and they are no smaller: no faster than {other.record.candidate.label}"
    return ""


def _said(other: SameLayers) -> str:
    batch = min(other.times)
    return (
        f"{other.record.candidate.label} takes {formatting.seconds(other.times[batch])}, its layers alone "
        f"{formatting.seconds(other.alone[batch])}, of this format {formatting.seconds(other.own[batch])}"
    )


def _twin_measured(known: KnownTrials, candidate: Candidate) -> Measured | None:
    """Return the measurements of the candidate's format on the first backend."""
    twin = known.records.get(eager_twin(candidate, known.first))
    return None if twin is None else twin.measured


def _variant_of(known: KnownTrials, candidate: Candidate) -> TrialRecord | None:
    """Return a timed trial of the candidate's backend, format and threads with other dtypes or calibration."""

    def form(one: Candidate) -> tuple[object, ...]:
        return one.backend, one.quant, one.bits, one.drop, one.threads

    if not candidate.is_quantized:
        return None
    found = (r for r in known.records.values() if form(r.candidate) == form(candidate))
    return next((r for r in found if r.measured is not None and r.measured.seconds), None)


def _gain(candidate: Candidate) -> float:
    """Return the largest speed-up of a candidate over the float form of its backend."""
    kind = candidate.quant.partition(":")[0] if candidate.is_quantized else "float"
    return GAIN.get(kind, MOST_GAIN) * (TILES_GAIN if "amx_int8" in device.isa() else 1.0)
