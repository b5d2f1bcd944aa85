"""The trials of a search so far: their costs relative to the float forms, the best one, and its rivals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ..budgets import Budgets
from ..latency import SLOWER
from ..plan import Plan
from ..report.search_record import Candidate, Measured, TrialRecord
from . import feasibility, space
from .feasibility import Limit
from .space import eager_twin
from .trial_process.messages import LowerBounds
from .trial_process.worker_process import SHORTEST

DOUBT = 2.0  # a thread that shares its core with another takes about twice as long
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
            known = self.reference_of(record.candidate)
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
        measured, aim = record.measured or Measured(), self.budgets.aim
        if aim in TIMED:
            return self.of_row(self.typical(record))
        size = measured.size if aim == "size" else measured.memory_with_cache(*self.budgets.cache_tokens)
        return math.inf if size is None else float(size)

    def of_row(self, seconds: Mapping[int, float]) -> float:
        """Return the seconds of a row that the objective looks at, of those by batch size."""
        if not seconds:
            return math.inf
        if self.budgets.aim == "latency":
            return seconds[min(seconds)]
        return min(value / size for size, value in seconds.items())

    def reference_of(self, candidate: Candidate) -> dict[str, dict[int, float]]:
        """Return the seconds of the float forms with the same number of threads as the candidate."""
        return self.reference.setdefault(candidate.threads, {})

    def typical(self, record: TrialRecord) -> dict[int, float]:
        """Return the seconds by batch size, comparable among trials: ratios to float forms times the first known
        seconds of these, so that a machine that slowed down during the search does not decide; the measured ones where
        no float form is known.

        A float form that was held up makes a ratio far too small, a trial that was, far too large. Other work only
        lengthens calls, so that the shortest one is near the truth whatever the machine did: times count up to `DOUBT`
        times it, and from it over `DOUBT` on.
        """
        measured, reference = record.measured or Measured(), self.reference_of(record.candidate)
        typical = {}
        for batch, seconds in measured.seconds.items():
            form = reference.get(measured.rivals.get(batch, ""), {}).get(batch)
            value = seconds if form is None else measured.ratios[batch] * form
            if (least := measured.least.get(batch)) is not None:
                value = min(max(value, least / DOUBT), least * DOUBT)
            typical[batch] = value
        return typical

    def expected_cost(self, candidate: Candidate) -> float:
        """Return the cost of the candidate's format on the first backend, or, on a backend that calls its operators,
        what the layers alone take there; infinite where it is not known.
        """
        twin = self.records.get(eager_twin(candidate, self.first))
        if twin is None:
            return math.inf
        alone = twin.measured.layer_seconds if twin.measured else {}
        if self.budgets.aim not in TIMED or space.layers_as(candidate.backend) != self.first:
            return self.cost(twin)
        return min(self.of_row(alone), self.cost(twin))

    def followers(self, candidate: Candidate) -> list[Candidate]:
        """Return the format of a trial on the backends that call the same operators: they come next, as what they
        reach bounds all others. Only where the trial became the best, another format was timed there, or the layers
        alone take less than the best trial.
        """
        best = self.best
        if not candidate.is_quantized or best is None or self.budgets.aim not in TIMED:
            return []
        found = space.same_operators(candidate, self.plan, self.budgets)
        timed = {
            r.candidate.backend for r in self.records.values() if r.candidate.is_quantized and r.measured
        }
        if best.candidate == candidate:
            return found
        return [one for one in found if one.backend in timed or self.expected_cost(one) < self.cost(best)]

    @property
    def memory_counts(self) -> bool:
        """True where memory or the size of an artifact is a budget or the objective."""
        by_size = self.budgets.aim == "size" or self.budgets.max_size is not None
        return by_size or space.memory_matters(self.budgets)

    def twin_measured(self, candidate: Candidate) -> Measured | None:
        """Return the measurements of the candidate's format on the first backend; None where there are none."""
        twin = self.records.get(eager_twin(candidate, self.first))
        return None if twin is None else twin.measured

    def float_trial(self, candidate: Candidate) -> TrialRecord | None:
        """Return the float trial with the candidate's backend and threads."""
        floats = (r for r in self.records.values() if r.candidate.is_float)
        place = candidate.backend, candidate.threads
        return next((r for r in floats if (r.candidate.backend, r.candidate.threads) == place), None)

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
