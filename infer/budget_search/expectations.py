"""Bounds on what a trial can reach, from the trials before it: those that can't win are skipped with the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import plugins
from ..budgets import Budgets
from ..latency import SLOWER
from ..plan import Plan
from ..report.rendering import formatting
from ..report.search_record import Candidate, Measured, TrialRecord
from .feasibility import Limit, cost, eligible, typical
from .space import BACKENDS, eager_twin

# The most that a format or dtype gains over float32 on one backend: the bytes it saves, or the products of its units.
GAIN = {"float": 4.0, "int8": 4.0, "fp8": 4.0}
MOST_GAIN = 8.0
QUALITY = ("--max-error", "--max-drop", "--min-score")


@dataclass
class Knowledge:
    """Trials so far, by candidate, and what follows from them. `reference`: first known seconds of the float forms."""

    plan: Plan
    budgets: Budgets
    first: str  # the backend that measures the fidelity of a format
    limits: Sequence[Limit]
    records: dict[Candidate, TrialRecord] = field(default_factory=dict)
    reference: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, record: TrialRecord) -> None:
        self.records[record.candidate] = record
        if record.measured is not None:
            for form, seconds in record.measured.rival_seconds.items():
                known = self.reference.setdefault(form, {})
                for batch, value in seconds.items():
                    known.setdefault(batch, value)

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
        return cost(record.measured or Measured(), self.budgets, self.reference)

    @property
    def generates(self) -> bool:
        """True for a language model whose trials run over a paged KV cache."""
        found = (record.measured for record in self.records.values())
        return any(m is not None and m.kv_bytes_per_token is not None for m in found)

    def rivals(self) -> tuple[str, ...] | None:
        """Return the backends whose float form is the fastest at a batch size; None while none is known."""
        times = {
            r.candidate.backend: typical(r.measured, self.reference)
            for r in self.records.values()
            if r.candidate.is_float and r.measured is not None and r.measured.seconds
        }
        if not times:
            return None
        sizes = {batch for seconds in times.values() for batch in seconds}
        fastest = (min(times, key=lambda name: times[name].get(batch, math.inf)) for batch in sorted(sizes))
        return tuple(dict.fromkeys(fastest))

    def why_skip(self, candidate: Candidate) -> str:
        """Return the bound that says that a candidate can't win, or "" where none does."""
        if self.generates and not plugins.get(BACKENDS, candidate.backend).STEPS:
            return f"{candidate.backend} has no attention over a paged KV cache and can't generate"
        return self._float_failed(candidate) or self._unfaithful(candidate) or self._too_slow(candidate)

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
        """Compare the float form of the backend, over the most that the format can gain, with budget and best trial."""
        own = self._float_of(candidate)
        if candidate.is_float or own is None or own.measured is None or not own.measured.seconds:
            return ""
        times, gain = typical(own.measured, self.reference), self._gain(candidate)
        batch = min(times)
        bound = times[batch] / gain
        spent = formatting.seconds(times[batch])
        least = f"{candidate.backend} in float takes {spent}, a format gains at most {gain:g}x"
        if self.budgets.max_latency is not None and bound > self.budgets.max_latency:
            return f"{least}: above --max-latency"
        best = self.best
        if best is None or best.measured is None or self.budgets.aim not in ("latency", "throughput"):
            return ""
        reachable = (
            bound if self.budgets.aim == "latency" else min(s / size for size, s in times.items()) / gain
        )
        if reachable > self.cost(best) * SLOWER:
            return f"{least}: slower than {best.candidate.label}"
        return ""

    def _float_of(self, candidate: Candidate) -> TrialRecord | None:
        found = (
            r
            for r in self.records.values()
            if r.candidate.is_float and r.candidate.threads == candidate.threads
        )
        return next((r for r in found if r.candidate.backend == candidate.backend), None)

    def _gain(self, candidate: Candidate) -> float:
        kind = candidate.quant.partition(":")[0] if candidate.is_quantized else "float"
        return GAIN.get(kind, MOST_GAIN)

    def expected_seconds(self, candidate: Candidate) -> float:
        """Return how long the longest trial of the same backend took; 0 where there was none."""
        took = [r.took for r in self.records.values() if r.candidate.backend == candidate.backend]
        return max(took, default=0.0)


def _error(record: TrialRecord) -> float:
    found = record.measured
    return math.inf if found is None or found.error is None else found.error
