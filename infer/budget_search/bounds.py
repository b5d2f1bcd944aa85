"""Three bounds on what a candidate can reach; one that can't win is skipped, with the bound as the reason.

- `without_a_trial`: packed bytes of the weights, and the roofline of this machine.
- `by_forms`: failures and losses of its float form and of its format elsewhere, and a timed form over the most that a
  format gains.
- `by_layers`: what layers take alone; `to_beat` gives the same limits to a trial, which times its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .. import device, plugins
from ..latency import FASTER, SLOWER
from ..report.rendering import formatting
from ..report.search_record import Candidate, Measured, TrialRecord
from ..run.trial_timing import FAR, LOST
from . import space
from .known_trials import TIMED, KnownTrials
from .space import BACKENDS, eager_twin
from .trial_process.messages import LowerBounds, ToBeat
from .trial_process.trial_result import Seconds, layers_too_slow, lost_by_layers

# The most that a format or dtype gains over float32 on one backend: twice the bytes it saves, or twice the products of
# its units (4 times those of float32 with VNNI, 16 times with AMX), for float forms that reach half of their peak.
GAIN = {"float": 4.0, "int8": 8.0, "fp8": 8.0}
MOST_GAIN = 16.0
TILES_GAIN = 4.0  # more with AMX
VARIANT_GAIN = 4.0  # of other KV types, dtypes and calibrations of a format that was measured
CLEARLY = 1.25  # times the best trial: a bound from the times of other forms holds but for their noise
NO_FASTER = (
    0.9  # times the layers of another format of its size: times of layers alone differ so much by noise
)
# Of a difference of layers alone that shows in a model, at least and at most.
LOST_SHARE, GAINED_SHARE = 0.5, 2.0
HALF = ("bfloat16", "float16")
QUALITY = ("--max-error", "--max-drop", "--min-score")


def why_skip(known: KnownTrials, candidate: Candidate) -> str:
    """Return the bound that says that a candidate can't win, or "" where none does."""
    if known.generates and not plugins.get(BACKENDS, candidate.backend).STEPS:
        return f"{candidate.backend} has no attention over a paged KV cache and can't generate"
    return without_a_trial(known, candidate) or by_forms(known, candidate) or by_layers(known, candidate)


def without_a_trial(known: KnownTrials, candidate: Candidate) -> str:
    """Compare bytes and roofline of the candidate's format with the budgets, and the roofline with the best trial."""
    budgets, bounds = known.budgets, known.bounds or LowerBounds()
    size, read = least_bytes(known, candidate), _of_format(candidate, bounds.read)
    if budgets.max_size is not None and size > budgets.max_size:
        return f"its weights alone take {formatting.size(round(size))}: above --max-size"
    if budgets.max_memory is not None and read > budgets.max_memory:
        return f"its weights alone take {formatting.size(round(read))} of memory: above --max-memory"
    least = {
        batch: _of_format(candidate, {name: by[batch] for name, by in bounds.seconds.items() if batch in by})
        for batch in sorted({batch for by in bounds.seconds.values() for batch in by})
    }
    if candidate.dtype in HALF or not least or not all(least.values()):  # whose peak is another one
        return ""
    first, rate = least[min(least)], max(batch / value for batch, value in least.items())
    said = f"the roofline of this machine allows no call under {formatting.seconds(first)}"
    for flag, limit in (("--max-latency", budgets.max_latency), ("--max-p99", budgets.max_p99)):
        if limit is not None and first > limit:
            return f"{said}: above {flag}"
    if budgets.min_throughput is not None and rate < budgets.min_throughput:
        return f"{said}, {rate:,.0f} rows per second: below --min-throughput"
    best = known.best
    if best is None or budgets.aim not in TIMED:
        return ""
    # Its cost alone is relative to a float form, which a busy machine may have delayed more than the trial.
    measured = known.of_row((best.measured or Measured()).seconds)
    slower = known.of_row(least) > max(known.cost(best), measured) * SLOWER
    return f"{said}: slower than {best.candidate.label}" if slower else ""


def least_bytes(known: KnownTrials, candidate: Candidate) -> float:
    """Return the bytes below which no artifact of a candidate can be; 0 where that is not known."""
    return _of_format(candidate, {} if known.bounds is None else known.bounds.size)


def _of_format(candidate: Candidate, bounds: Mapping[str, float]) -> float:
    """Return the bound of a candidate's format, or of its mean bits; 0 where none is known."""
    if candidate.drop:
        return 0.0
    value = bounds.get(candidate.quant, 0.0)
    value *= 1.0 if candidate.bits is None else candidate.bits / 32
    return value / 2 if candidate.dtype in HALF else value


def by_forms(known: KnownTrials, candidate: Candidate) -> str:
    """Compare with trials of other forms: the float form of the backend, the format on the first backend, and times."""
    own, twin = known.float_trial(candidate), known.records.get(eager_twin(candidate, known.first))
    if own is not None and not candidate.is_float and own.outcome not in ("published", "skipped"):
        return f"{own.candidate.label}: {own.outcome}, {own.reason}"
    if twin is not None and twin.measured is not None and candidate.backend != known.first:
        measured = twin.measured  # every backend decodes the same weights
        if not measured.faithful:
            return f"{twin.candidate.label}: {twin.reason}"
        judged = [x for x in known.limits if x.flag in QUALITY and x.of(measured) is not None]
        if missed := [x for x in judged if x.excess(measured) > 1]:
            return f"{twin.candidate.label} would need {missed[0].needed(measured)}"
    return _too_slow(known, candidate)


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
    times, best = known.typical(own), known.best
    first = times[min(times)]
    least = f"{own.candidate.label} takes {formatting.seconds(first)}, {kind} gains at most {gain:g}x"
    if known.budgets.max_latency is not None and first / gain > known.budgets.max_latency:
        return f"{least}: above --max-latency"
    if best is None or best.measured is None or known.budgets.aim not in TIMED:
        return ""
    slower = known.of_row(times) / gain > known.cost(best) * SLOWER
    return f"{least}: slower than {best.candidate.label}" if slower else ""


def _variant_of(known: KnownTrials, candidate: Candidate) -> TrialRecord | None:
    """Return a timed trial of the candidate's backend, format and threads with other dtypes or calibration."""

    def form(one: Candidate) -> tuple[object, ...]:
        return one.backend, one.quant, one.bits, one.drop, one.threads

    if not candidate.is_quantized:
        return None
    same = (r for r in known.records.values() if form(r.candidate) == form(candidate))
    return next((r for r in same if r.measured is not None and r.measured.seconds), None)


def _gain(candidate: Candidate) -> float:
    """Return the largest speed-up of a candidate over the float form of its backend."""
    kind = candidate.quant.partition(":")[0] if candidate.is_quantized else "float"
    return GAIN.get(kind, MOST_GAIN) * (TILES_GAIN if "amx_int8" in device.isa() else 1.0)


def by_layers(known: KnownTrials, candidate: Candidate) -> str:
    """Compare what the candidate's layers take alone with what they may take, on a backend that calls the operators of
    another one (`LAYERS_AS`), where they were timed.
    """
    best, limits = known.best, _near_best(known)
    if best is None or candidate.options or space.layers_as(candidate.backend) == candidate.backend:
        return ""
    most = _most_layers(known, candidate, candidate.backend, limits)
    return layers_too_slow(_layers_alone(known, candidate), most, best.candidate.label)


def to_beat(known: KnownTrials, candidate: Candidate) -> ToBeat | None:
    """Return the best trial as the timing of a candidate needs it, its times as ratios to each float form.

    None where speed is not the objective, or where the user's own metric measures quality.
    """
    best, reference, limits = known.best, known.reference_of(candidate), _near_best(known)
    measured = None if best is None else best.measured
    if best is None or measured is None or not limits or known.budgets.metric is not None:
        return None
    if measured.size is None or measured.error is None or not reference:
        return None
    return ToBeat(
        label=best.candidate.label,
        ratios={
            form: {size: limit / seconds[size] for size, limit in limits.items() if size in seconds}
            for form, seconds in reference.items()
        },
        least={size: measured.least[size] for size in limits if size in measured.least},
        size=measured.size,
        error=measured.error,
        far=None if known.memory_counts else FAR,
        least_gain=_least_gain(known, candidate, limits),
        most_layers=_most_layers_anywhere(known, candidate, limits),
    )


def still_holds(known: KnownTrials, record: TrialRecord) -> bool:
    """Return whether a recorded trial says enough for this search: what lost has to lose against the best of now,
    memory and size have to be known where they count.
    """
    measured = record.measured
    if record.outcome != "skipped":
        return measured is None or measured.complete or not known.memory_counts
    best = to_beat(known, record.candidate)
    if best is None or measured is None or known.best is None:
        return False
    if not measured.seconds:
        return bool(lost_by_layers(measured.layer_seconds, measured.layer_gain, best))
    worse = (measured.size or 0) >= best.size and (measured.error or 0.0) >= best.error
    return worse and known.cost(record) > LOST * known.cost(known.best)


def _near_best(known: KnownTrials) -> dict[int, float]:
    """Return the seconds of a call of the best trial by the batch sizes that the objective looks at, as it counts them;
    {} where speed is not the objective.
    """
    best = known.best
    if best is None or best.measured is None or known.budgets.aim not in TIMED:
        return {}
    sizes, cost = sorted(best.measured.seconds), known.cost(best)
    if known.budgets.aim == "latency":
        return dict.fromkeys(sizes[:1], cost)
    return {size: cost * size for size in sizes}


def _least_gain(known: KnownTrials, candidate: Candidate, limits: Seconds) -> dict[int, float]:
    """Return the seconds that quantized layers alone must save over float on their backend to come near `limits`, and
    to be noticed: the float form is no faster than the best trial.

    Only for runtimes of graphs: there what is between the layers is the same as in float, while the programs of fused
    native operators leave parts of it out.
    """
    own = known.float_trial(candidate)
    if own is None or not candidate.is_quantized or not plugins.get(BACKENDS, candidate.backend).PORTABLE:
        return {}
    times = known.typical(own)
    return {
        size: max(times[size] - CLEARLY * seconds, (1 - FASTER) * times[size]) / GAINED_SHARE
        for size, seconds in limits.items()
        if size in times
    }


def _most_layers_anywhere(known: KnownTrials, candidate: Candidate, limits: Seconds) -> dict[int, float]:
    """Return the seconds that the layers of a format may take alone so that it comes near `limits` on the candidate's
    backend or on one that calls the same operators; {} unless other formats were timed on each of them.
    """
    if not candidate.is_quantized or space.layers_as(candidate.backend) != candidate.backend:
        return {}
    names = [n for n in space.backends(known.plan, known.budgets) if space.layers_as(n) == candidate.backend]
    most = [_most_layers(known, candidate, name, limits) for name in names]
    return {size: max(by[size] for by in most) for size in limits} if most and all(most) else {}


def _most_layers(known: KnownTrials, candidate: Candidate, backend: str, limits: Seconds) -> dict[int, float]:
    """Return the seconds that the layers of a candidate may take alone so that it comes near `limits` on one backend,
    by the formats that were timed there; {} where none was.

    What is between the layers is the same in all of them: what a format takes longer or shorter shows at `LOST_SHARE`
    or `GAINED_SHARE` at least. Of the medians and the shortest calls those count that allow more: other processes
    lengthen medians.
    """
    most: dict[int, float] = {}
    best = (known.best.measured if known.best else None) or Measured()
    for record in known.records.values():
        other = record.candidate
        if not other.is_quantized or (other.backend, other.threads) != (backend, candidate.threads):
            continue
        times, alone = known.typical(record), _layers_alone(known, other)
        least = (record.measured or Measured()).least
        for size in limits.keys() & times.keys() & alone.keys():
            slack = CLEARLY * limits[size] - times[size]
            if size in least and size in best.least:
                slack = max(slack, CLEARLY * best.least[size] - least[size])
            longer = slack / (LOST_SHARE if slack > 0 else GAINED_SHARE)
            allowed = min(alone[size] + longer, _times_as_small(known, record, candidate) * alone[size])
            most[size] = min(most.get(size, math.inf), allowed)
    return most if most.keys() == limits.keys() else {}


def _times_as_small(known: KnownTrials, other: TrialRecord, candidate: Candidate) -> float:
    """Return how many times as long as those of another format the layers of a candidate may take that is no smaller:
    it could win by noise alone, or by being more faithful. Infinite where it may win otherwise.

    Layers of formats of one size differ by noise: those of a more faithful one have to be clearly slower. Where the
    layers are not those of the trials that judged them, the candidate must be coarser than the best one by its bits.
    """
    best, theirs = known.best, other.candidate
    if best is None or known.memory_counts or not candidate.is_quantized or candidate.bits or theirs.bits:
        return math.inf
    own, twin = (known.twin_measured(one) or Measured() for one in (candidate, theirs))
    if own.size and twin.size and space.layers_as(candidate.backend) != candidate.backend:
        if own.size < FASTER * twin.size or known.cost(other) <= FASTER * known.cost(best):
            return math.inf
        coarser = own.error is not None and twin.error is not None and own.error >= twin.error
        return NO_FASTER if coarser else CLEARLY
    sizes = {} if known.bounds is None else known.bounds.size
    bits, others = sizes.get(candidate.quant, 0), sizes.get(theirs.quant, 0)
    is_coarser = bits > 0 and others > 0 and sizes.get(best.candidate.quant, 0) > bits
    return CLEARLY if is_coarser and bits >= FASTER * others else math.inf


def _layers_alone(known: KnownTrials, candidate: Candidate) -> Seconds:
    """Return what the layers of a candidate's format, or of float, take alone, by batch size, as trials on the backend
    found whose operators they call; of float in another dtype the least that they could. {} where not all of its layers
    were timed: convolutions are not.
    """
    twin = eager_twin(candidate, space.layers_as(candidate.backend))
    if candidate.is_quantized:
        own = (known.records[twin].measured if twin in known.records else None) or Measured()
        return {size: s for size, s in own.layer_seconds.items() if size in own.layer_gain}
    most = 1.0 if candidate.is_float else space.dtype_gain()
    for record in known.records.values():
        other, found = record.candidate, record.measured or Measured()
        if found.layer_gain and (other.backend, other.threads) == (twin.backend, twin.threads):
            return {
                size: (found.layer_seconds[size] + gain) / most for size, gain in found.layer_gain.items()
            }
    return {}
