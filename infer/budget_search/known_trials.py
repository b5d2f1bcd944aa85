"""Bounds on what a trial can reach, from the trials before it: those that can't win are skipped with the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import device, plugins
from ..budgets import Budgets
from ..latency import SLOWER
from ..plan import Plan
from ..report.rendering import formatting
from ..report.search_record import Candidate, Measured, TrialRecord
from .feasibility import Limit, cost, eligible, typical
from .space import BACKENDS, eager_twin
from .trial_process.messages import LowerBounds, ToBeat

# The most that a format or dtype gains over float32 on one backend: twice the bytes it saves, or twice the products of
# its units (4 times those of float32 with VNNI, 16 times with AMX), for float forms that reach half of their peak.
GAIN = {"float": 8.0, "int8": 8.0, "fp8": 8.0}
MOST_GAIN = 16.0
TILES_GAIN = 4.0  # more with AMX
VARIANT_GAIN = 4.0  # of other KV types, dtypes and calibrations of a format that was measured
LOST = 1.1  # times the cost of the best trial: then a trial known as lost is lost again
TIMED, HALF = ("latency", "throughput"), ("bfloat16", "float16")
QUALITY = ("--max-error", "--max-drop", "--min-score")


@dataclass
class Knowledge:
    """Trials so far, by candidate, and what follows from them.

    `reference`: first known seconds of the float forms, by number of threads. `bounds`: None until they were asked for.
    """

    plan: Plan
    budgets: Budgets
    first: str  # the backend that measures the fidelity of a format
    limits: Sequence[Limit]
    records: dict[Candidate, TrialRecord] = field(default_factory=dict)
    reference: dict[int | None, dict[str, dict[int, float]]] = field(default_factory=dict)
    bounds: LowerBounds | None = None

    def add(self, record: TrialRecord) -> None:
        self.records[record.candidate] = record
        if record.measured is not None:
            known = self._reference(record.candidate)
            self._refer(known, record.measured.rival_seconds)
            if (
                record.candidate.is_float and record.measured.ratios
            ):  # the form that later trials are timed against
                known[f"{record.candidate.backend} float32"] = self._typical(record)

    def _refer(self, known: dict[str, dict[int, float]], forms: Mapping[str, Mapping[int, float]]) -> None:
        """Keep the seconds of float forms not known yet. Forms of one trial were timed in turns: a new one is put in
        relation to one that was known, so that a machine that slowed down since then does not tell them apart.
        """
        old = {form: dict(by) for form, by in known.items()}
        for form, seconds in forms.items():
            for batch, value in seconds.items():
                both = (old[one][batch] / by[batch] for one, by in forms.items() if batch in old.get(one, {}))
                known.setdefault(form, {}).setdefault(batch, value * next(both, 1.0))

    @property
    def best(self) -> TrialRecord | None:
        """Return the eligible trial with the least cost; of two within 3 % the more faithful one."""
        found = [r for r in self.records.values() if eligible(r, self.limits, self.budgets, self.plan)]
        if not found:
            return None
        costs = {r.candidate: self.cost(r) for r in found}
        least = min(costs.values())
        near = [r for r in found if costs[r.candidate] <= least * SLOWER]
        return min(near, key=lambda r: (_error(r), costs[r.candidate]))

    def cost(self, record: TrialRecord) -> float:
        return cost(record.measured or Measured(), self.budgets, self._reference(record.candidate))

    def _reference(self, candidate: Candidate) -> dict[str, dict[int, float]]:
        """Return the float forms with the candidate's threads: their times say nothing of others."""
        return self.reference.setdefault(candidate.threads, {})

    def _typical(self, record: TrialRecord) -> dict[int, float]:
        return typical(record.measured or Measured(), self._reference(record.candidate))

    def to_beat(self, candidate: Candidate) -> ToBeat | None:
        """Return the best trial as a candidate's timing needs it; None where speed is not the aim, or quality is the
        user's own.
        """
        best, reference = self.best, self._reference(candidate)
        found = None if best is None else best.measured
        if best is None or found is None or self.budgets.aim not in TIMED or self.budgets.metric is not None:
            return None
        if found.size is None or found.error is None or not reference:
            return None
        least = self.cost(best)
        sizes = sorted(found.seconds)
        sizes = sizes[:1] if self.budgets.aim == "latency" else sizes
        rows = {size: 1 if self.budgets.aim == "latency" else size for size in sizes}
        ratios = {
            form: {size: least * rows[size] / seconds[size] for size in sizes if size in seconds}
            for form, seconds in reference.items()
        }
        return ToBeat(label=best.candidate.label, ratios=ratios, size=found.size, error=found.error)

    def still_lost(self, record: TrialRecord) -> bool:
        """Return True when a trial that was not published, being slower than another, has still one that beats it."""
        to_beat, found = self.to_beat(record.candidate), record.measured
        if to_beat is None or found is None or self.best is None or not found.seconds:
            return False
        worse = (found.size or 0) >= to_beat.size and (found.error or 0.0) >= to_beat.error
        return worse and self.cost(record) > LOST * self.cost(self.best)

    @property
    def generates(self) -> bool:
        """True for a language model whose trials run over a paged KV cache."""
        found = (record.measured for record in self.records.values())
        return any(m is not None and m.kv_bytes_per_token is not None for m in found)

    def rivals(self) -> tuple[str, ...] | None:
        """Return the backends whose float form is the fastest at a batch size; None while none is known."""
        times = {
            r.candidate.backend: self._typical(r)
            for r in self.records.values()
            if r.candidate.is_float and r.measured is not None and r.measured.seconds
        }
        if not times:
            floats = [r for r in self.records.values() if r.candidate.is_float]
            return () if floats and all(r.outcome == "skipped" for r in floats) else None
        sizes = {batch for seconds in times.values() for batch in seconds}
        fastest = (min(times, key=lambda name: times[name].get(batch, math.inf)) for batch in sorted(sizes))
        return tuple(dict.fromkeys(fastest))

    def why_skip(self, candidate: Candidate) -> str:
        """Return the bound that says that a candidate can't win, or "" where none does."""
        if self.generates and not plugins.get(BACKENDS, candidate.backend).STEPS:
            return f"{candidate.backend} has no attention over a paged KV cache and can't generate"
        return (
            self._too_large(candidate)
            or self._above_roofline(candidate)
            or self._float_failed(candidate)
            or self._unfaithful(candidate)
            or self._too_slow(candidate)
        )

    def _too_large(self, candidate: Candidate) -> str:
        """Compare the bytes of the packed weights, and of the cache, with the budgets."""
        size = self.least_bytes(candidate)
        read = self._least(candidate, {} if self.bounds is None else self.bounds.read)
        if self.budgets.max_size is not None and size > self.budgets.max_size:
            return f"its weights alone take {formatting.size(round(size))}: above --max-size"
        if self.budgets.max_memory is not None and read > self.budgets.max_memory:
            return f"its weights alone take {formatting.size(round(read))} of memory: above --max-memory"
        return ""

    def least_bytes(self, candidate: Candidate) -> float:
        """Return the bytes below which no artifact of a candidate can be; 0 where that is not known."""
        return self._least(candidate, {} if self.bounds is None else self.bounds.size)

    def _least(self, candidate: Candidate, known: Mapping[str, float]) -> float:
        """Return the bound of a candidate's format, or of its mean bits; 0 where none is known."""
        if candidate.drop:
            return 0.0
        value = known.get(candidate.quant, 0.0)
        value *= 1.0 if candidate.bits is None else candidate.bits / 32
        return value / 2 if candidate.dtype in HALF else value

    def _above_roofline(self, candidate: Candidate) -> str:
        """Compare the roofline of the format with the budgets of time and with the best trial."""
        half = candidate.dtype in HALF  # whose peak is another one
        seconds = {} if self.bounds is None or half else self.bounds.seconds
        known = {
            batch: self._least(candidate, {name: by[batch] for name, by in seconds.items() if batch in by})
            for batch in sorted({batch for by in seconds.values() for batch in by})
        }
        if not known or not all(known.values()):
            return ""
        first, rate = known[min(known)], max(batch / value for batch, value in known.items())
        said = f"the roofline of this machine allows no call under {formatting.seconds(first)}"
        budgets = self.budgets
        for flag, limit in (("--max-latency", budgets.max_latency), ("--max-p99", budgets.max_p99)):
            if limit is not None and first > limit:
                return f"{said}: above {flag}"
        if budgets.min_throughput is not None and rate < budgets.min_throughput:
            return f"{said}, {rate:,.0f} rows per second: below --min-throughput"
        best = self.best
        if best is None or budgets.aim not in TIMED:
            return ""
        reachable = first if budgets.aim == "latency" else 1 / rate
        slower = reachable > max(self.cost(best), self._seconds(best)) * SLOWER
        return f"{said}: slower than {best.candidate.label}" if slower else ""

    def _seconds(self, record: TrialRecord) -> float:
        """Return the seconds of a row that a trial took when it was timed, as a roofline can be compared with; its cost
        is in relation to a float form, which on a busy machine may have been held up far longer.
        """
        found = record.measured or Measured()
        if self.budgets.aim == "latency":
            return found.latency or 0.0
        return 1 / found.throughput if found.throughput else 0.0

    def _float_failed(self, candidate: Candidate) -> str:
        own = self._float_of(candidate)
        if candidate.is_float or own is None or own.outcome in ("published", "skipped"):
            return ""
        return f"{own.candidate.label}: {own.outcome}, {own.reason}"

    def _unfaithful(self, candidate: Candidate) -> str:
        """Compare with the fidelity of the format, measured once: every backend decodes the same weights."""
        twin = self.records.get(eager_twin(candidate, self.first))
        if twin is None or twin.measured is None or candidate.backend == self.first:
            return ""
        if not twin.measured.faithful:
            return f"{twin.candidate.label}: {twin.reason}"
        missed = [x for x in self.limits if x.flag in QUALITY and x.excess(twin.measured) > 1]
        return f"{twin.candidate.label} would need {missed[0].needed(twin.measured)}" if missed else ""

    def _too_slow(self, candidate: Candidate) -> str:
        """Compare a measured trial of the backend, over the most that the candidate can gain on it, with the budget and
        the best trial: one of the same format, else the float form.

        The float form of `first`, plain torch, bounds nothing: quantized models run on fused operators there.
        """
        own = self._variant_of(candidate)
        gain, kind = VARIANT_GAIN, "a variant of it"
        if own is None and candidate.backend != self.first:
            own, gain, kind = self._float_of(candidate), self._gain(candidate), "a format"
        if candidate.is_float or own is None or own.measured is None or not own.measured.seconds:
            return ""
        times = self._typical(own)
        batch = min(times)
        bound = times[batch] / gain
        least = (
            f"{own.candidate.label} takes {formatting.seconds(times[batch])}, {kind} gains at most {gain:g}x"
        )
        if self.budgets.max_latency is not None and bound > self.budgets.max_latency:
            return f"{least}: above --max-latency"
        best = self.best
        if best is None or best.measured is None or self.budgets.aim not in TIMED:
            return ""
        reachable = (
            bound if self.budgets.aim == "latency" else min(s / size for size, s in times.items()) / gain
        )
        if reachable > self.cost(best) * SLOWER:
            return f"{least}: slower than {best.candidate.label}"
        return ""

    def _variant_of(self, candidate: Candidate) -> TrialRecord | None:
        """Return a timed trial of the candidate's backend, format and threads with other dtypes or calibration."""

        def form(one: Candidate) -> tuple[object, ...]:
            return one.backend, one.quant, one.bits, one.drop, one.threads

        if not candidate.is_quantized:
            return None
        found = (r for r in self.records.values() if form(r.candidate) == form(candidate))
        return next((r for r in found if r.measured is not None and r.measured.seconds), None)

    def _float_of(self, candidate: Candidate) -> TrialRecord | None:
        found = (
            r
            for r in self.records.values()
            if r.candidate.is_float and r.candidate.threads == candidate.threads
        )
        return next((r for r in found if r.candidate.backend == candidate.backend), None)

    def _gain(self, candidate: Candidate) -> float:
        kind = candidate.quant.partition(":")[0] if candidate.is_quantized else "float"
        return GAIN.get(kind, MOST_GAIN) * (TILES_GAIN if "amx_int8" in device.isa() else 1.0)

    def expected_seconds(self, candidate: Candidate) -> float:
        """Return how long the longest trial of the same backend took; 0 where there was none."""
        took = [r.took for r in self.records.values() if r.candidate.backend == candidate.backend]
        return max(took, default=0.0)


def _error(record: TrialRecord) -> float:
    found = record.measured
    return math.inf if found is None or found.error is None else found.error
