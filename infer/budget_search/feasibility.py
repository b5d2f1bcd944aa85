"""Budgets against measurements: missed budgets of a trial, the winning trial, and the error when none fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..budgets import Budgets
from ..errors import GateError
from ..options.values import format_bytes, format_seconds
from ..plan import Plan
from ..report.rendering import formatting
from ..report.search_record import Measured, TrialRecord
from ..spec import Finding

NEAREST = 3
Value = float | None


@dataclass(frozen=True)
class Limit:
    """One budget: its flag, its value, the measurement that it limits, and how both are written."""

    flag: str
    bound: float
    of: Callable[[Measured], Value]
    format: Callable[[float], str]
    at_least: bool = False

    def excess(self, measured: Measured) -> float:
        """Return the factor by which a measurement misses the budget; up to 1 when met, infinite when unknown."""
        value = self.of(measured)
        if value is None or math.isnan(value):
            return math.inf
        if self.at_least:
            if value >= self.bound:
                return 1.0
            return self.bound / value if value > 0 and self.bound > 0 else 1 + abs(self.bound - value)
        return value / self.bound if self.bound > 0 else (1.0 if value <= self.bound else math.inf)

    def needed(self, measured: Measured) -> str:
        """Write the budget that this measurement would meet, `--max-latency 6.2ms`."""
        value = self.of(measured)
        return f"{self.flag} (unknown)" if value is None else f"{self.flag} {self.format(value)}"


def limits_of(budgets: Budgets, plan: Plan, float_score: float | None = None) -> list[Limit]:
    """List the budgets that are set. With a metric of the user --max-drop limits its loss against `float_score`."""
    sequences, tokens = budgets.cache_tokens
    found = [
        Limit("--max-latency", budgets.max_latency or 0, lambda m: m.latency, _up_seconds),
        Limit("--max-p99", budgets.max_p99 or 0, lambda m: m.latency_p99, _up_seconds),
        Limit("--max-first-token", budgets.max_first_token or 0, lambda m: m.first_token, _up_seconds),
        Limit("--min-throughput", budgets.min_throughput or 0, lambda m: m.throughput, _down, at_least=True),
        Limit(
            "--max-memory",
            budgets.max_memory or 0,
            lambda m: m.memory_with_cache(sequences, tokens),
            _up_bytes,
        ),
        Limit("--max-size", budgets.max_size or 0, lambda m: m.size, _up_bytes),
        Limit("--max-error", plan.max_error or 0, lambda m: m.error, _up),
    ]
    found = [limit for limit in found if limit.bound]
    if budgets.min_score is not None:
        found.append(Limit("--min-score", budgets.min_score, lambda m: m.score, _down, at_least=True))
    if plan.max_drop is not None and budgets.metric is None:
        found.append(Limit("--max-drop", plan.max_drop, lambda m: m.drop, _up_share))
    elif plan.max_drop is not None and float_score is not None:
        known = float_score
        found.append(
            Limit(
                "--max-drop", plan.max_drop, lambda m: None if m.score is None else known - m.score, _up_share
            )
        )
    return found


def misses(measured: Measured, limits: Sequence[Limit]) -> tuple[str, ...]:
    """Return what each budget that a trial misses would have to be."""
    return tuple(limit.needed(measured) for limit in limits if limit.excess(measured) > 1)


def eligible(record: TrialRecord, limits: Sequence[Limit], budgets: Budgets, plan: Plan) -> bool:
    """Return True for a trial that may be published: within every budget, and not slower than float for nothing."""
    found = record.measured
    if record.outcome != "published" or found is None or misses(found, limits):
        return False
    return not found.slower or bool(keeps_slower(budgets, plan))


def keeps_slower(budgets: Budgets, plan: Plan) -> str:
    """Return the option for which a trial slower than float may win: memory or size is the point; "" for none."""
    if budgets.aim in ("memory", "size"):
        return f"--for {budgets.aim}"
    if budgets.max_memory:
        return "--max-memory"
    if budgets.max_size:
        return "--max-size"
    return "--allow-slower" if plan.allow_slower else ""


def nothing_fits(records: Sequence[TrialRecord], limits: Sequence[Limit]) -> GateError:
    """Make the error that names the nearest trials and what each budget would have to be for them; of trials that were
    not run the first ones.
    """
    measured = [record for record in records if record.measured is not None and record.measured.seconds]
    if not measured and records and all(record.outcome == "skipped" for record in records):
        least = "; ".join(f"{r.candidate.label}: {r.reason}" for r in records[:NEAREST])
        return GateError(
            f"no trial can meet the budgets, so none was run. The nearest: {least}",
            hint="Nothing was published. Allow one of these, or leave a budget out",
        )
    if not measured:
        reasons = "; ".join(f"{r.candidate.label} {r.outcome}: {r.reason}" for r in records[:NEAREST])
        return GateError(
            f"no trial of the search could be measured: {reasons or 'there was none'}",
            hint="Nothing was published. Give more --time, or another --space",
        )
    ranked = sorted(measured, key=lambda record: _distance(record, limits))[:NEAREST]
    lines = [f"{record.candidate.label} would need {_needs(record, limits)}" for record in ranked]
    skipped = sum(record.outcome == "skipped" for record in records)
    out = f"; {skipped} trials were not run" if skipped else ""
    return GateError(
        f"no trial meets the budgets. The nearest: {'; '.join(lines)}{out}",
        hint="Nothing was published. Allow one of these, or leave a budget out",
    )


def _distance(record: TrialRecord, limits: Sequence[Limit]) -> tuple[bool, float]:
    """Sum of the logarithms of the excesses; trials that failed a gate come last."""
    found = record.measured or Measured()
    factors = [max(1.0, limit.excess(found)) for limit in limits]
    return record.outcome != "published", sum(
        math.log(factor) if factor < math.inf else 1e3 for factor in factors
    )


def _needs(record: TrialRecord, limits: Sequence[Limit]) -> str:
    found = record.measured or Measured()
    missed = list(misses(found, limits))
    if record.outcome != "published":
        missed.append(f"a looser gate ({record.reason})")
    elif found.slower:
        missed.append("--allow-slower")
    return " and ".join(missed) or "nothing else"


def _rounded(value: float, figures: int, *, up: bool) -> float:
    """Round to so many figures, never past the value in the other direction."""
    near = float(f"{value:.{figures - 1}e}")
    if near == value or (near > value) is up:
        return near
    step = 10.0 ** (math.floor(math.log10(abs(value))) - figures + 1)
    return float(f"{near + (step if up else -step):.{figures - 1}e}")


def _up_seconds(value: float) -> str:
    return format_seconds(_rounded(value, 3, up=True))


def _up_bytes(value: float) -> str:
    return format_bytes(math.ceil(value / 1e6) * 10**6) if value >= 1e6 else f"{value:.0f}"


def _up_share(value: float) -> str:
    return f"{_rounded(100 * value, 3, up=True):g}%" if value < 0.999 else _up(value)


def _up(value: float) -> str:
    return f"{_rounded(value, 3, up=True):g}"


def _down(value: float) -> str:
    return f"{_rounded(value, 6, up=False):g}"


def objective_text(record: TrialRecord, budgets: Budgets) -> str:
    """Write what the objective measures of a trial, for display: `1.21 ms`."""
    found, aim = record.measured or Measured(), budgets.aim
    if aim == "throughput":
        rate = found.throughput
        return "not timed" if rate is None else f"{rate:,.0f} per second"
    if aim == "latency":
        return formatting.seconds(found.latency)
    return formatting.size(found.size if aim == "size" else found.memory_with_cache(*budgets.cache_tokens))


def trial_finding(record: TrialRecord, limits: Sequence[Limit]) -> Finding:
    """Return the line of a trial, for display."""
    found = record.measured
    value = None if found is None else found.latency
    missed = misses(found, limits) if found is not None and record.outcome == "published" else ()
    known = "known, " if record.from_journal else f"on {record.node}, " if record.node else ""
    why = f"would need {' and '.join(missed)}" if missed else record.reason
    return Finding("search", record.candidate.label, value, "s", f"{known}{record.outcome}: {why}")
