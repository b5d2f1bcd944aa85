"""Choice of the trial to publish, and the gates that refuse it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .. import fidelity, latency, rows
from ..errors import GateError
from ..fidelity.thresholds import coarser_cache
from ..plan import Plan
from ..report.rendering import formatting
from ..results import BackendResult, LayerError
from ..spec import Choice, LayerChoice
from .float_graph import Original
from .float_reference import EAGER, FLOAT_FORM, ONNX_RUNTIME, FloatReferences
from .run_trial import is_faithful
from .trial import Trial
from .try_backends import Compressed, Trials

LOSSY = 1e-4  # relative error of a layer from which on its weights are a cause
PAYS = 1.2  # times faster than the fastest float32 forms: from here on a coarser dtype is chosen


@dataclass(frozen=True)
class Selected:
    """The trial to publish, why it is this one, and how every backend fared. `dtype` says what bfloat16 would give,
    where it was tried.
    """

    trial: Trial
    choice: Choice
    backends: tuple[BackendResult, ...]
    dtype: str = ""
    others: tuple[Trial, ...] = ()  # that were tried in the plan's dtype


def choose(tried: Trials) -> Selected:
    """Choose the trial to publish among those that pass their gates; when none passes, among all.

    It is the one whose worst batch size is nearest to the fastest trial at that size, so that a gain at a large batch
    doesn't hide a loss at a small one; within the 3 % of the speed gate the least total time decides. Trials in a
    coarser dtype than the plan's come first where they pay.
    """
    plan, trials = tried.plan, tried.trials
    passing = [t for t in trials if t.failure(plan) is None]
    coarser = [t for t in passing if t.dtype and _pays(t)]
    in_plans_dtype = [t for t in trials if not t.dtype]
    pool = coarser or [t for t in passing if not t.dtype] or in_plans_dtype
    ranked = sorted(pool, key=lambda t: (max(latency.SLOWER, _worst_ratio(t, pool)), t.seconds))
    best = ranked[0]
    if coarser:
        ranked += sorted((t for t in passing if not t.dtype), key=lambda t: t.seconds)
    why = _choice_reason(best, ranked, tried) if plan.backend == "auto" else "asked for"
    results = [_result(trial, best) for trial in trials]
    tried.reporter.found([*(result.finding() for result in results), *best.findings])
    tried.reporter.found(metric.finding() for metric in best.fidelity)
    choice = Choice("backend", plan.backend, best.backend, why)
    others = tuple(trial for trial in in_plans_dtype if trial is not best)
    return Selected(best, choice, (*tried.refused, *results), _dtype_reason(tried, best), others)


def _result(trial: Trial, best: Trial) -> BackendResult:
    """Return how a trial fared: its time, its verdict, and how many times the time of the chosen one it took."""
    seconds = trial.seconds if trial.latency else None
    why = trial.verdict
    if seconds is not None and trial is not best and best.latency:
        why = f"{seconds / best.seconds:.2f}x the time of {best.name}; {why}"
    return BackendResult(trial.name, "chosen" if trial is best else "tried", seconds, why, trial.dtype)


def _pays(trial: Trial) -> bool:
    """Return true for a trial that is faster than the float32 forms by enough to give up precision for it."""
    return trial.gain >= PAYS and any(t.pair.verdict == "faster" for t in trial.latency)


def _dtype_reason(tried: Trials, best: Trial) -> str:
    """Return what trials in a coarser dtype than the plan's gained, or why they were refused; "" without any."""
    if best.dtype:
        return f"{best.gain:.2f}x the speed of {best.baseline}, and within the limits of {best.dtype}"
    each = [f"{t.name} {_shortcoming(t, tried.plan)}" for t in tried.trials if t.dtype]
    each += [f"{refused.name}: {refused.why}" for refused in tried.refused if refused.dtype]
    return "; ".join(each)


def _shortcoming(trial: Trial, plan: Plan) -> str:
    if unfaithful := trial.unfaithful(plan):
        return f"is not faithful enough: {unfaithful}"
    return f"is {trial.gain:.2f}x as fast as the fastest float32 forms, {PAYS:g} is wanted; {trial.verdict}"


def _worst_ratio(trial: Trial, pool: Sequence[Trial]) -> float:
    """Return the largest ratio to the fastest trial's time over the batch sizes; infinite when not timed."""
    timed = [t.typical for t in pool if t.latency]
    ratios = [
        seconds / max(min(times[batch] for times in timed), 1e-9) for batch, seconds in trial.typical.items()
    ]
    return max(ratios, default=math.inf)


def _choice_reason(best: Trial, ranked: Sequence[Trial], tried: Trials) -> str:
    """Say by what the trial won; where it had no rival, which others were tried or refused."""
    if len(ranked) == 1:
        failed = [f"{t.name} {_why_out(t, tried.plan)}" for t in tried.trials if t is not best]
        skipped = [result.name for result in tried.refused if result.outcome == "skipped"]
        refused = [result.name for result in tried.refused if result.outcome == "refused"]
        lists = [("could not win", skipped), ("refused", refused)]
        out = "; ".join([*failed, *(f"{what}: {', '.join(names)}" for what, names in lists if names)])
        which = "worth timing" if skipped else "that can run it here"
        which = f"of {1 + len(failed)} tried that passed" if failed else which
        return f"the only one {which}; {out}" if out else "the only one there is"
    if not best.latency:
        return "not timed"
    others = ", ".join(f"{t.name} {t.seconds / best.seconds:.2f}x" for t in ranked[1:])
    worst = _worst_ratio(best, ranked)
    nearest = f"at most {worst:.2f}x of the fastest at a batch size, the others more"
    return f"{'the fastest here' if worst <= latency.SLOWER else nearest}; time of the others: {others}"


def _why_out(trial: Trial, plan: Plan) -> str:
    if trial.unfaithful(plan):
        return "is not faithful enough"
    if trial.failure(plan):
        return "is slower than float" if trial.slower else "gains nothing"
    return "gains too little"


def enforce(
    plan: Plan,
    selected: Selected,
    original: Original,
    small: Compressed,
    stuck: str = "",
    floats: FloatReferences | None = None,
) -> None:
    """Raise `GateError` at the gates. That of fidelity names the worst layers, and why none rises, those of speed and
    gain what each trial brought; all say the way out, which was tried: on the float forms of `floats`.
    """
    best = selected.trial
    reason = best.unfaithful(plan)
    if reason:
        worst = ""
        if original.loaded.module is not None and small.module is not None and plan.quant != "none":
            few = rows.cut(original.graph.inputs, original.graph.samples, 0, 4)
            worst = _cause(fidelity.worst_layers(original.loaded.module, small.module, few))
        worst += f"; {stuck}" if stuck else ""
        milder = "Choose a milder --quant" if plan.quant != "none" else "Choose another --backend"
        if plan.quant == "none" and (best.dtype or plan.dtype) != "float32":
            milder = "Keep --dtype fp32"
        if coarser_cache(plan) and best.shape is not None:
            worst += f"; the KV cache is {plan.kv_dtype}, coarser than the weights"
            milder = "Keep keys and values exact with --kv-dtype fp32"
        loosened = best.violates(plan.with_(max_error=math.inf)) is None
        raise GateError(
            f"refused, not faithful enough: {reason}{worst}",
            hint=f"Nothing was published. {milder}{', or allow more with --max-error' * loosened}",
        )
    busy = next((trial.busy for trial in (best, *selected.others) if trial.busy), "")
    if busy and plan.strict_timing:
        raise GateError(
            f"refused, {busy}, and did not end while it waited",
            hint="Nothing was published. Run it when the machine is quiet, or without --strict-timing",
        )
    if best.gains_nothing(plan) or (best.slower and not plan.allow_slower):
        what = "no gain" if best.gains_nothing(plan) else "slower"
        timed = [trial.brought() for trial in (best, *selected.others) if trial.latency]
        wrong = [f"{t.name} is not faithful enough" for t in selected.others if t.unfaithful(plan)]
        tried = "; ".join((*timed, *wrong, *([busy] if busy else [])))
        source = "" if best.source_size is None else f" and a source of {formatting.size(best.source_size)}"
        tried += f"; against {best.baseline}{source}"
        by = f"{plan.quant} by " if plan.quant != "none" else ""
        raise GateError(
            f"refused, {what}: {by}{tried}{_left_format(plan, small.layers)}",
            hint=f"Nothing was published. {_instead(plan, best, original, floats)}",
        )


def _instead(plan: Plan, best: Trial, original: Original, floats: FloatReferences | None) -> str:
    """Name what to ask for in place of a form without gain: the float form of a backend that was faster than what the
    user has and answers the same, where there is one, else what keeps the form.
    """
    keeps = "--allow-slower keeps " + ("the smaller model" if best.smaller else "it")
    if floats is None or best.shape is not None or not best.changed:
        return keeps
    today = next((name for name in best.forms if name.startswith((EAGER, ONNX_RUNTIME))), "")
    gains = {
        name.removesuffix(FLOAT_FORM): min(best.forms[today][size] / took for size, took in seconds.items())
        for name, seconds in best.forms.items()
        if today and name.endswith(FLOAT_FORM)
    }
    for name, gain in sorted(gains.items(), key=lambda pair: -pair[1]):
        if gain * latency.FASTER > 1 and is_faithful(plan, name, floats, original.graph):
            return f"Use --quant none --backend {name}, {gain:.2f}x as fast as {today}; {keeps}"
    return f"--quant none keeps the model as it is; {keeps}"


def _cause(layers: Sequence[LayerError]) -> str:
    """Name the layers whose weights lose most; where none loses anything, what is rounded is not the weights."""
    lossy = [layer for layer in layers if layer.error is None or layer.error >= LOSSY]
    if not layers:
        return ""
    if not lossy:
        return "; the weights are those of the source: what differs is the rounding of activations to 8 bits"
    return "; worst layers: " + ", ".join(f"{layer.name} {_error(layer.error)}" for layer in lossy)


def _left_format(plan: Plan, layers: Sequence[LayerChoice]) -> str:
    """Say how many layers the fidelity gate took out of the format asked for; "" where none."""
    raised = sum(layer.by == "sensitivity" for layer in layers)
    return f"; {raised} of {len(layers)} layers left {plan.quant} to be faithful enough" if raised else ""


def _error(value: float | None) -> str:
    return "of unknown error" if value is None else f"{value:.3f}"
