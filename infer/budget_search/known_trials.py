"""The trials of a search so far: their costs relative to the float forms, the best one, and its rivals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from .. import plugins
from ..budgets import Budgets
from ..latency import SLOWER
from ..plan import Plan
from ..report.search_record import Candidate, Measured, TrialRecord
from . import feasibility, space
from .feasibility import Limit
from .space import BACKENDS, eager_twin
from .trial_process.messages import LowerBounds, ToBeat
from .trial_process.trial_result import gains_too_little
from .trial_process.trial_runner import SHORTEST

LOST = 1.1  # times the cost of the best trial: then a trial known as lost is lost again
CLEARLY = 1.25  # times the best trial: a bound from the times of other forms holds but for their noise
FAR = 2.0  # times the best trial: no artifact is made, as noise is far from making such a trial the best
TIMED = ("latency", "throughput")  # objectives


@dataclass
class KnownTrials:
    """Trials so far, by candidate.

    `reference`: first known seconds of the float forms, by number of threads. `bounds`: lower bounds without a trial,
    None until a worker was asked for them.
    """

    plan: Plan
    budgets: Budgets
    first: str  # the backend that measures the fidelity of a format
    limits: Sequence[Limit]
    records: dict[Candidate, TrialRecord] = field(default_factory=dict)
    reference: dict[int | None, dict[str, dict[int, float]]] = field(default_factory=dict)
    bounds: LowerBounds | None = None

    def add(self, record: TrialRecord) -> None:
        """Add a finished trial, and the seconds of the float forms that it was timed against.

        Times in turns of an earlier search for another objective are left out.
        """
        if record.turns is not None and record.turns.aim != self.budgets.aim:
            record = msgspec.structs.replace(record, turns=None)
        self.records[record.candidate] = record
        if record.measured is not None:
            known = self._reference(record.candidate)
            self._refer(known, record.measured.rival_seconds)
            # Later trials are timed against this form.
            if record.candidate.is_float and record.measured.ratios:
                known[f"{record.candidate.backend} float32"] = self.typical(record)

    def _refer(self, known: dict[str, dict[int, float]], forms: Mapping[str, Mapping[int, float]]) -> None:
        """Keep the seconds of float forms not known yet.

        Forms of one trial were timed in turns, so the seconds of a new one are scaled by those of a known one: a
        machine that slowed down between two trials then makes no difference between their forms.
        """
        old = {form: dict(by) for form, by in known.items()}
        for form, seconds in forms.items():
            for batch, value in seconds.items():
                both = (old[one][batch] / by[batch] for one, by in forms.items() if batch in old.get(one, {}))
                known.setdefault(form, {}).setdefault(batch, value * next(both, 1.0))

    def use_float_score(self) -> None:
        """Set the limits again with the score of the first float trial, for a metric of the user."""
        scores = [r.measured.score for r in self.records.values() if r.candidate.is_float and r.measured]
        score = next((score for score in scores if score is not None), None)
        self.limits = feasibility.limits_of(self.budgets, self.plan, score)

    @property
    def best(self) -> TrialRecord | None:
        """Return the eligible trial with the least cost; of two within 3 % the more faithful one."""
        found = [
            r for r in self.records.values() if feasibility.eligible(r, self.limits, self.budgets, self.plan)
        ]
        if not found:
            return None
        costs = {r.candidate: self.cost(r) for r in found}
        least = min(costs.values())
        near = [r for r in found if costs[r.candidate] <= least * SLOWER]
        return min(near, key=lambda r: (_error(r), costs[r.candidate]))

    def cost(self, record: TrialRecord) -> float:
        """Return what the objective minimizes, from times in relation to float forms with the same threads.

        Trials timed in turns keep their ratios, to the least cost among them.
        """
        if (turns := record.turns) is None:
            return self._own_cost(record)
        same = [r for r in self.records.values() if r.turns is not None and r.turns.against == turns.against]
        return turns.ratio * min(map(self._own_cost, [*same, record]))

    def _own_cost(self, record: TrialRecord) -> float:
        return feasibility.cost(
            record.measured or Measured(), self.budgets, self._reference(record.candidate)
        )

    def _reference(self, candidate: Candidate) -> dict[str, dict[int, float]]:
        """Return the seconds of the float forms with the same number of threads as the candidate."""
        return self.reference.setdefault(candidate.threads, {})

    def typical(self, record: TrialRecord) -> dict[int, float]:
        """Return the seconds by batch size, scaled by those of the float forms of the same trial."""
        return feasibility.typical(record.measured or Measured(), self._reference(record.candidate))

    def expected_cost(self, candidate: Candidate) -> float:
        """Return the cost of the candidate's format on the first backend; infinite where it is not known."""
        twin = self.records.get(eager_twin(candidate, self.first))
        return math.inf if twin is None else self.cost(twin)

    def to_beat(self, candidate: Candidate) -> ToBeat | None:
        """Return the best trial as the timing of a candidate needs it, its times as ratios to each float form.

        None where speed is not the objective, or where the user's own metric measures quality.
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
        shortest = {size: found.least[size] for size in sizes if size in found.least}
        return ToBeat(
            label=best.candidate.label,
            ratios=ratios,
            least=shortest,
            size=found.size,
            error=found.error,
            far=None if self.memory_counts else FAR,
            gain_needed=self._gain_needed(candidate, {size: least * rows[size] for size in sizes}),
        )

    @property
    def memory_counts(self) -> bool:
        """True where memory or the size of an artifact is a budget or the objective."""
        by_size = self.budgets.aim == "size" or self.budgets.max_size is not None
        return by_size or space.memory_matters(self.budgets)

    def _gain_needed(self, candidate: Candidate, limits: Mapping[int, float]) -> dict[int, float]:
        """Return the seconds that quantized layers must save over float on their backend to come near `limits`.

        Only for runtimes of graphs: there what is between the layers is the same as in float, while the programs of
        fused native operators leave parts of it out.
        """
        own = self.float_trial(candidate)
        if own is None or not candidate.is_quantized or not plugins.get(BACKENDS, candidate.backend).PORTABLE:
            return {}
        times = self.typical(own)
        return {size: times[size] - CLEARLY * seconds for size, seconds in limits.items() if size in times}

    def float_trial(self, candidate: Candidate) -> TrialRecord | None:
        """Return the float trial with the candidate's backend and threads."""
        floats = (r for r in self.records.values() if r.candidate.is_float)
        place = candidate.backend, candidate.threads
        return next((r for r in floats if (r.candidate.backend, r.candidate.threads) == place), None)

    def still_holds(self, record: TrialRecord) -> bool:
        """Return whether a recorded trial says enough for this search: what lost has to lose against the best of now,
        memory and size have to be known where they count.
        """
        if record.outcome == "skipped":
            return self.still_lost(record)
        return record.measured is None or record.measured.complete or not self.memory_counts

    def still_lost(self, record: TrialRecord) -> bool:
        """Return whether a trial that was skipped as slower than another would still lose against the best one."""
        to_beat, found = self.to_beat(record.candidate), record.measured
        if to_beat is None or found is None or self.best is None:
            return False
        if not found.seconds:
            return bool(gains_too_little(found.layer_gain, to_beat))
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
            r.candidate.backend: self.typical(r)
            for r in self.records.values()
            if r.candidate.is_float and r.measured is not None and r.measured.seconds
        }
        if not times:
            floats = [r for r in self.records.values() if r.candidate.is_float]
            return () if floats and all(r.outcome == "skipped" for r in floats) else None
        sizes = {batch for seconds in times.values() for batch in seconds}
        fastest = (min(times, key=lambda name: times[name].get(batch, math.inf)) for batch in sorted(sizes))
        return tuple(dict.fromkeys(fastest))

    def out_of_time(self, candidate: Candidate, left: float | None) -> str:
        """Return why a trial is not begun with so many seconds left, "" where it is; None: no limit."""
        if left is None:
            return ""
        if left < SHORTEST:
            return "the time of the search was over"
        expected = self.expected_seconds(candidate)
        return f"{left:.0f} s were left, such a trial takes {expected:.0f} s" if expected > left else ""

    def expected_seconds(self, candidate: Candidate) -> float:
        """Return the median duration of trials of the same backend that ran; 0 where there was none."""
        own = (r for r in self.records.values() if r.candidate.backend == candidate.backend)
        took = [r.took for r in own if r.outcome != "skipped" or r.measured is not None]
        return statistics.median(took) if took else 0.0


def _error(record: TrialRecord) -> float:
    found = record.measured
    return math.inf if found is None or found.error is None else found.error
