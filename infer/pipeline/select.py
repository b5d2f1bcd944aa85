"""Every backend that may run a graph is tried on it; the fastest that passes its gates is taken, or a gate speaks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import nn

from .. import fidelity, latency, library_errors, plugins
from ..errors import GateError, InferError, NotUsableError, ResourceError
from ..graph import capture
from ..llm.step.paged_step import StepShape
from ..plan import Plan
from ..results import BackendResult, ScoresOnly
from ..spec import Choice, Finding
from ..thresholds import coarser_cache
from .float_reference import EAGER, FloatForms
from .run import Street
from .trial import Trial, run_trial
from .trial_timing import time_trials


@dataclass
class Shrunk:
    """What is lowered. Of a language model that can generate `graph` is its step, of that `shape`; `windows` captures
    the whole-window form, for backends that have no paged attention."""

    graph: capture.Graph
    module: nn.Module | None
    shape: StepShape | None = None
    windows: Callable[[], capture.Graph] | None = None


def try_backends(
    street: Street, original: capture.Graph, shrunk: Shrunk, folder: Path, floats: FloatForms
) -> list[Trial]:
    """Lower, compare and time on every backend that may run the graph. Plain torch is tried too when no other can, or
    when each of them is slower than it in float.

    Raises `NotUsableError` when none can run it, `ResourceError` when memory or disk was what stopped one.
    """
    tried = _Tried(street, original, shrunk, folder, floats)
    names = candidates(street.plan, steps=shrunk.shape is not None)
    for name in names:
        if name != "eager" or not tried.trials:
            tried.run(name)
    tried.time()
    if "eager" in names and tried.lost_to_plain_torch():
        tried.run("eager")
        tried.time()
    if not tried.trials and tried.full is not None:
        raise tried.full
    if not tried.trials:
        why = "; ".join(tried.errors)
        raise NotUsableError(f"no backend can run this model: {why}", hint="Run 'infer doctor'")
    return tried.trials


@dataclass
class _Tried:
    """The trials of one graph so far, and why others failed."""

    street: Street
    original: capture.Graph
    shrunk: Shrunk
    folder: Path
    floats: FloatForms
    trials: list[Trial] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    full: ResourceError | None = None

    def run(self, name: str) -> None:
        """Lower on one backend and compare; a refusal is noted."""
        street, plan = self.street, self.street.plan.with_(backend=name)
        small, shape, place, why = self._form(name)
        reason = plugins.why_not("backends", name) or plugins.get("backends", name).refuses(
            small, street.plan
        )
        if reason:
            street.tried(BackendResult(name, "refused", None, reason))
            self.errors.append(f"{name}: {reason}")
            return
        at = _Steps(street)
        at.step("lower", name)
        work = self.folder / "trials" / name
        try:
            trial = run_trial(plan, self.original, small, place, work, at.step, self.floats, shape)
            trial.scores_only = why
            self.trials.append(trial)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is its backend's refusal
            refusal = _refused(street, name, at.name, error, _others(name, small, plan))
            self.full = refusal if isinstance(refusal, ResourceError) else self.full
            self.errors.append(f"{name}: {refusal}")

    def _form(self, name: str) -> tuple[capture.Graph, StepShape | None, Path, ScoresOnly | None]:
        """The graph for a backend, its shape as a step, its folder, and why it only scores text."""
        shrunk = self.shrunk
        if shrunk.shape is None or plugins.get("backends", name).STEPS or shrunk.windows is None:
            return shrunk.graph, shrunk.shape, self.folder, self.street.scores_only
        why = ScoresOnly(f"{name} has no attention over a paged KV cache", by_model=False)
        self.street.found([Finding("lower", "generation", False, why=why.reason)])
        small, place = shrunk.windows(), self.folder / "trials" / f"windows-{name}"
        shutil.rmtree(place, ignore_errors=True)  # of a round before layers rose
        place.mkdir(parents=True)
        capture.save(small, place)
        return small, None, place, why

    def time(self) -> None:
        """Time what was not timed yet; a trial that can't run at the batch sizes of the plan leaves."""

        def failed(trial: Trial, error: Exception) -> None:
            self.trials.remove(trial)
            self.errors.append(f"{trial.backend}: {_refused(street, trial.backend, 'time', error, [])}")

        street, new = self.street, [t for t in self.trials if not t.latency]
        street.found(time_trials(street.plan, self.original, new, self.floats, street.watch.step, failed))

    def lost_to_plain_torch(self) -> bool:
        """True when every trial that was timed is slower than torch eager at a batch size, and that was not tried."""
        timed = [t for t in self.trials if t.latency]
        absent = all(t.backend != "eager" for t in self.trials)
        return bool(timed) and absent and all(t.loses_to(EAGER) for t in timed)


def _refused(street: Street, name: str, stage: str, error: Exception, others: list[str]) -> InferError:
    """A refusal that is noted where other backends may still do; raised where this one was asked for."""
    refusal = library_errors.of_backend(name, stage, error, others)
    if street.plan.backend != "auto" or not isinstance(refusal, NotUsableError | ResourceError):
        raise refusal from (None if refusal is error else error)
    street.tried(BackendResult(name, "refused", None, str(refusal)))
    return refusal


@dataclass
class _Steps:
    """Which step of a trial was begun last."""

    street: Street
    name: str = ""

    def step(self, name: str, detail: str) -> None:
        self.name = name
        self.street.watch.step(name, detail)


def _others(name: str, graph: capture.Graph, plan: Plan) -> list[str]:
    """The backends that may take what this one failed with."""
    return [
        other
        for other in sorted(plugins.names("backends"), key=lambda one: one != "ort")
        if other != name
        and plugins.why_not("backends", other) is None
        and plugins.get("backends", other).refuses(graph, plan.with_(backend=other)) is None
    ]


def candidates(plan: Plan, *, steps: bool = False) -> list[str]:
    """The backend that was asked for; of "auto" all of them, plain torch only when no other one can.

    Of a language model (`steps`) "auto" means those that can generate.
    """
    if plan.backend != "auto":
        return [plan.backend]
    names = [n for n in plugins.names("backends") if not steps or plugins.get("backends", n).STEPS]
    return sorted(names, key=lambda name: name == "eager")


def choose(street: Street, trials: list[Trial]) -> Trial:
    """The trial to publish of those that pass their gates; when none passes, of all (a gate then speaks).

    It is the one whose worst batch size is nearest to the fastest trial at that size, so that a gain at a large batch
    doesn't hide a loss at a small one; within the 3 % of the speed gate the least total time decides.
    """
    passing = [t for t in trials if t.failure(street.plan) is None]
    pool = passing or trials
    ranked = sorted(pool, key=lambda t: (max(latency.SLOWER, _worst(t, pool)), t.seconds))
    best = ranked[0]
    asked = street.asked
    why = _why(best, ranked) if asked == "auto" else "asked for"
    street.choices.append(Choice("backend", asked, best.backend, why))
    for trial in trials:
        outcome: Literal["chosen", "tried"] = "chosen" if trial is best else "tried"
        seconds = trial.seconds if trial.latency else None
        street.tried(BackendResult(trial.backend, outcome, seconds, trial.verdict))
    street.plan = street.plan.with_(backend=best.backend)
    street.found([*best.findings, *(metric.finding() for metric in best.fidelity)])
    return best


def _worst(trial: Trial, pool: Sequence[Trial]) -> float:
    """The largest ratio of its time to that of the fastest trial, over the batch sizes; infinite when not timed."""
    timed = [t.typical for t in pool if t.latency]
    ratios = [
        seconds / max(min(times[batch] for times in timed), 1e-9) for batch, seconds in trial.typical.items()
    ]
    return max(ratios, default=math.inf)


def _why(best: Trial, ranked: Sequence[Trial]) -> str:
    if len(ranked) == 1:
        return "the only one that was tried"
    if not best.latency:
        return "not timed"
    others = ", ".join(f"{t.backend} {t.seconds / best.seconds:.2f}x" for t in ranked[1:])
    worst = _worst(best, ranked)
    nearest = f"at most {worst:.2f}x of the fastest at a batch size, the others more"
    return f"{'the fastest here' if worst <= latency.SLOWER else nearest}; time of the others: {others}"


def enforce(
    street: Street,
    best: Trial,
    original: nn.Module | None,
    module: nn.Module | None,
    graph: capture.Graph,
    stuck: str = "",
) -> None:
    """The two gates. The fidelity gate names the worst layers, and why none rises; both say the way out."""
    reason = best.unfaithful(street.plan)
    if reason:
        worst = ""
        if original is not None and module is not None and street.plan.quant != "none":
            rows = {name: value[:4] for name, value in graph.samples.items()}
            layers = fidelity.worst_layers(original, module, rows)
            worst = "; worst layers: " + ", ".join(f"{layer.name} {_error(layer.error)}" for layer in layers)
        worst += f"; {stuck}" if stuck else ""
        milder = "Choose a milder --quant"
        if coarser_cache(street.plan) and best.shape is not None:
            worst += f"; the KV cache is {street.plan.kv_dtype}, coarser than the weights"
            milder = "Keep keys and values exact with --kv-dtype fp32"
        raise GateError(
            f"refused, not faithful enough: {reason}{worst}",
            hint=f"Nothing was published. {milder}, or allow more with --max-error",
        )
    if best.slower and not street.plan.allow_slower:
        raise GateError(
            f"refused, slower: {best.verdict}",
            hint="Nothing was published. --allow-slower keeps the smaller model, --quant none the float one",
        )


def _error(value: float | None) -> str:
    return "of unknown error" if value is None else f"{value:.3f}"
