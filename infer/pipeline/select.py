"""Choice of the trial to publish, and the gates that refuse it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .. import fidelity, latency
from ..errors import GateError
from ..fidelity.thresholds import coarser_cache
from ..graph.program import Graph
from ..plan import Plan
from ..results import BackendResult
from ..spec import Choice
from .trial import Trial
from .try_backends import Trials


@dataclass(frozen=True)
class Selected:
    """The trial to publish, why it is this one, and how every backend fared."""

    trial: Trial
    choice: Choice
    backends: tuple[BackendResult, ...]


def choose(tried: Trials) -> Selected:
    """Choose the trial to publish among those that pass their gates; when none passes, among all.

    It is the one whose worst batch size is nearest to the fastest trial at that size, so that a gain at a large batch
    doesn't hide a loss at a small one; within the 3 % of the speed gate the least total time decides.
    """
    plan, trials = tried.plan, tried.trials
    pool = [t for t in trials if t.failure(plan) is None] or trials
    ranked = sorted(pool, key=lambda t: (max(latency.SLOWER, _worst_ratio(t, pool)), t.seconds))
    best = ranked[0]
    why = _choice_reason(best, ranked) if plan.backend == "auto" else "asked for"
    results = [_result(trial, chosen=trial is best) for trial in trials]
    tried.reporter.found([*(result.finding() for result in results), *best.findings])
    tried.reporter.found(metric.finding() for metric in best.fidelity)
    choice = Choice("backend", plan.backend, best.backend, why)
    return Selected(best, choice, (*tried.refused, *results))


def _result(trial: Trial, *, chosen: bool) -> BackendResult:
    seconds = trial.seconds if trial.latency else None
    return BackendResult(trial.backend, "chosen" if chosen else "tried", seconds, trial.verdict)


def _worst_ratio(trial: Trial, pool: Sequence[Trial]) -> float:
    """Return the largest ratio to the fastest trial's time over the batch sizes; infinite when not timed."""
    timed = [t.typical for t in pool if t.latency]
    ratios = [
        seconds / max(min(times[batch] for times in timed), 1e-9) for batch, seconds in trial.typical.items()
    ]
    return max(ratios, default=math.inf)


def _choice_reason(best: Trial, ranked: Sequence[Trial]) -> str:
    if len(ranked) == 1:
        return "the only one that was tried"
    if not best.latency:
        return "not timed"
    others = ", ".join(f"{t.backend} {t.seconds / best.seconds:.2f}x" for t in ranked[1:])
    worst = _worst_ratio(best, ranked)
    nearest = f"at most {worst:.2f}x of the fastest at a batch size, the others more"
    return f"{'the fastest here' if worst <= latency.SLOWER else nearest}; time of the others: {others}"


def enforce(
    plan: Plan,
    best: Trial,
    original: Graph,
    float_module: nn.Module | None,
    small_module: nn.Module | None,
    stuck: str = "",
) -> None:
    """Raise `GateError` at the two gates. That of fidelity names the worst layers, and why none rises; both say the way
    out.
    """
    reason = best.unfaithful(plan)
    if reason:
        worst = ""
        if float_module is not None and small_module is not None and plan.quant != "none":
            rows = {name: value[:4] for name, value in original.samples.items()}
            layers = fidelity.worst_layers(float_module, small_module, rows)
            worst = "; worst layers: " + ", ".join(f"{layer.name} {_error(layer.error)}" for layer in layers)
        worst += f"; {stuck}" if stuck else ""
        milder = "Choose a milder --quant"
        if coarser_cache(plan) and best.shape is not None:
            worst += f"; the KV cache is {plan.kv_dtype}, coarser than the weights"
            milder = "Keep keys and values exact with --kv-dtype fp32"
        raise GateError(
            f"refused, not faithful enough: {reason}{worst}",
            hint=f"Nothing was published. {milder}, or allow more with --max-error",
        )
    if best.slower and not plan.allow_slower:
        raise GateError(
            f"refused, slower: {best.verdict}",
            hint="Nothing was published. --allow-slower keeps the smaller model, --quant none the float one",
        )


def _error(value: float | None) -> str:
    return "of unknown error" if value is None else f"{value:.3f}"
