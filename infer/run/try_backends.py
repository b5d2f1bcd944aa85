"""Lowering, comparison and timing of a compressed model on every backend that may run it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from .. import library_errors, plugins
from ..errors import InferError, NotUsableError, ResourceError, UsageError
from ..graph import encoder_decoder_graphs, storage
from ..graph.program import Graph, OnnxGraph, TorchGraph
from ..llm.step.step_shape import StepShape
from ..plan import Plan
from ..reporter import Reporter
from ..results import BackendResult, ScoresOnly
from ..spec import Finding, LayerChoice
from .float_reference import EAGER, FloatReferences
from .original_runners import Eager
from .run_trial import BehindError, run_trial
from .trial import Trial
from .trial_timing import BEHIND, TimingRules, time_trials, times_behind, why_not_compiled


@dataclass(frozen=True)
class Compressed:
    """The smaller model as it is lowered. Of a language model that can generate `graph` is its step, of that `shape`;
    `windows` captures the whole-window form, for backends that have no paged attention.
    """

    graph: Graph
    module: nn.Module | None
    shape: StepShape | None = None
    windows: Callable[[], Graph] | None = None
    scores_only: ScoresOnly | None = None
    layers: tuple[LayerChoice, ...] = ()
    quantized: str = ""  # the share of the weights, as the verdict says it


def try_backends(
    plan: Plan,
    original: Graph,
    small: Compressed,
    folder: Path,
    floats: FloatReferences,
    reporter: Reporter | None = None,
    *,
    only: str = "auto",
    rules: TimingRules | None = None,
) -> Trials:
    """Lower, compare and time on every backend that may run the graph. Plain torch is tried too when no other can, or
    when each of them is slower than it in float. `only`: the backend that an earlier attempt chose; the others follow
    where its trial is faithful.

    Raises `NotUsableError` when none can run it, `ResourceError` when memory or disk was what stopped one.
    """
    tried = Trials(
        plan, original, small, folder, floats, reporter or Reporter(), rules=rules or TimingRules()
    )
    names = candidates(plan, steps=small.shape is not None)
    for name in names if only == "auto" else [only]:
        if (name != "eager" or not tried.trials) and not tried.bounded(name):
            tried.run(name)
    if any(trial.unfaithful(plan) is None for trial in tried.trials):
        for name in names:
            if name != "eager" and name not in tried.names() and not tried.bounded(name):
                tried.run(name)
    tried.time()
    if "eager" in names and "eager" not in tried.names() and tried.lost_to_plain_torch():
        tried.run("eager")
        tried.time()
    if not tried.trials and tried.full is not None:
        raise tried.full
    if not tried.trials:
        raise tried.nobody()
    return tried


@dataclass(frozen=True)
class Needed:
    """An option without which a backend's answers are not faithful enough."""

    option: str
    value: str
    why: str

    def said(self, backend: str) -> str:
        """Return the sentence of the verdict."""
        return f"{backend} runs with {self.option} {self.value}: {self.why}"


@dataclass
class Trials:
    """The trials of one compressed model so far, and the backends that refused it."""

    plan: Plan
    original: Graph
    small: Compressed
    folder: Path
    floats: FloatReferences
    reporter: Reporter
    trials: list[Trial] = field(default_factory=list)
    refused: list[BackendResult] = field(default_factory=list)
    full: ResourceError | None = None
    dtype: str = ""  # of the trials, where those that they are ranked with have another one
    rules: TimingRules = field(default_factory=TimingRules)
    needed: Needed | None = None

    def run(self, name: str) -> None:
        """Lower on one backend and compare with the original; record a refusal."""
        plan = self.plan.with_(backend=name)
        small, shape, place, scores_only = self._form(name)
        reason = plugins.why_not("backends", name) or encoder_decoder_graphs.refusal(
            plugins.get("backends", name), small, self.plan
        )
        if reason:
            self.refuse(name, reason)
            return
        at = _Steps(self.reporter)

        def attempt(options: Mapping[str, str]) -> Trial:
            chosen = plan.with_(backend_options=plan.backend_options | dict(options))
            label = " ".join((name, *options.values()))
            at.step("lower", f"{label} {self.dtype}".rstrip())
            work = self.folder / "trials" / label.replace(" ", "-")
            trial = run_trial(
                *(chosen, self.original, small, place, work, at.step, self.floats, shape), self._why_behind
            )
            trial.scores_only, trial.dtype = scores_only, self.dtype
            return trial

        try:
            self.trials.append(self._exact_enough(plan, attempt))
        except BehindError as error:
            self.refuse(name, str(error), skipped=True)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is its backend's refusal
            self._failed(name, at.name, error, _other_backends(name, small, plan))

    def _why_behind(self, runner: Any) -> str:
        """Return how far a runner is behind a faithful trial at every batch size, so that it need not be compared; ""
        where it is near, or "auto" has no choice to make.
        """
        if self.plan.backend != "auto" or not self.plan.batches or not self.rules.uses_bounds:
            return ""
        rivals = [t for t in self.trials if t.unfaithful(self.plan) is None and not t.ahead_of_time]
        with self.rules.alone():
            for rival in rivals:
                if (times := times_behind(runner, rival, self.original, self.plan)) > BEHIND:
                    return f"{times:.1f}x the time of {rival.name}"
        return ""

    def bounded(self, name: str) -> bool:
        """Return whether a backend that compiles need not be lowered, and record why: what its kernels take alone in
        plain torch is no less than another trial, or a quantized graph is not faithful enough with them.

        Of a quantized model plain torch becomes a trial too, unless the same bound rules it out. Steps of language
        models, and plans without times, have no bound.
        """
        plan, small = self.plan, self.small
        if plan.backend != "auto" or not plugins.compiles(name):
            return False
        if not plan.batches or plan.device != "cpu" or small.shape is not None or not self.rules.uses_bounds:
            return False
        if not isinstance(small.graph, TorchGraph) or plugins.why_not("backends", name):
            return False
        runner: Any = next((trial.runner for trial in self.trials if trial.backend == "eager"), None)
        runner = runner or Eager(small.graph)
        reason = why_not_compiled(plan, self.original, runner, self.trials)
        if plan.quant != "none" and "eager" not in self.names():
            if reason:
                self.refuse("eager", reason, skipped=True)
            else:
                self.run("eager")
                reason = self._compiled_after_eager(plan)
        if reason:
            self.refuse(name, reason, skipped=True)
        return bool(reason)

    def _compiled_after_eager(self, plan: Plan) -> str:
        """Return why a quantized graph need not be compiled, now that it was tried in plain torch."""
        eager = next((trial for trial in self.trials if trial.backend == "eager"), None)
        if eager is None:
            return ""
        if reason := eager.unfaithful(plan):
            return f"its kernels in plain torch are not faithful enough: {reason}"
        return why_not_compiled(plan, self.original, eager.runner, self.trials)

    def _exact_enough(self, plan: Plan, attempt: Callable[[Mapping[str, str]], Trial]) -> Trial:
        """Return the trial of a backend, made with the first of its cautious options that is enough where the
        optimizations of its library change the answer or refuse the graph, or its integers lose too much.
        """
        if (trial := self._as_the_other_backend(plan, attempt)) is not None:
            return trial
        outcome, reason = _judged(plan, attempt, {})
        for option, value in self._more_exact(plan, outcome) if reason else ():
            other, why = _judged(plan, attempt, {option: value})
            if isinstance(other, Exception) or why:
                self.reporter.found(
                    [Finding("lower", f"{plan.backend} {option} {value}", "refused", why=why or "")]
                )
                _discard(other)
                continue
            self.needed = Needed(option, value, f"otherwise, {reason}")
            other.cautious = self.needed.said(plan.backend)
            _discard(outcome)
            return other
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _as_the_other_backend(
        self, plan: Plan, attempt: Callable[[Mapping[str, str]], Trial]
    ) -> Trial | None:
        """Return a faithful trial with the codes that the same file needed on another backend, which would lose as much
        with coarser ones here; None where there is none.
        """
        needed = self.needed
        if needed is None or plan.backend_options.get(needed.option) is not None:
            return None
        if needed.option not in getattr(plugins.get("backends", plan.backend), "OPTIONS", {}):
            return None
        trial, reason = _judged(plan, attempt, {needed.option: needed.value})
        if isinstance(trial, Exception) or reason:
            _discard(trial)
            return None
        trial.cautious = needed.said(plan.backend)
        return trial

    def _more_exact(self, plan: Plan, outcome: Trial | Exception) -> Iterator[tuple[str, str]]:
        """Yield options of a backend and their values, what costs least first: those that lowering named for its
        quantized layers, else its optimizations, except of quantized torch models, whose formats change answers too.
        """
        if not isinstance(outcome, Exception) and outcome.more_exact:
            yield from outcome.more_exact
            return
        option, values = getattr(plugins.get("backends", plan.backend), "CAUTIOUS", ("", ()))
        if values and (plan.quant == "none" or isinstance(self.original, OnnxGraph)):
            yield from ((option, value) for value in values if option not in plan.backend_options)

    def _form(self, name: str) -> tuple[Graph, StepShape | None, Path, ScoresOnly | None]:
        """Choose the graph for a backend, its shape as a step, its folder, and why it only scores text."""
        small = self.small
        if small.shape is None or plugins.get("backends", name).STEPS or small.windows is None:
            return small.graph, small.shape, self.folder, small.scores_only
        why = ScoresOnly(f"{name} has no attention over a paged KV cache", by_model=False)
        self.reporter.found([Finding("lower", "generation", False, why=why.reason)])
        graph, place = small.windows(), self.folder / "trials" / f"windows-{name}"
        shutil.rmtree(place, ignore_errors=True)  # of an attempt before layers rose
        place.mkdir(parents=True)
        storage.save(graph, place)
        return graph, None, place, why

    def nobody(self) -> InferError:
        """Return why no backend ran the model: the format, where one of them takes the model without; else the cause of
        the one that came nearest. Of a backend that was named, its own cause and another one that takes the plan.
        """
        named = self.plan.backend
        if named != "auto" and (able := _other_backends(named, self.small.graph, self.plan)):
            quantized = f" quantized to {self.plan.quant}" if self._format_refused(named) else ""
            reason = self.refused[-1].why
            return NotUsableError(
                f"{named} can't run this model{quantized}: {reason}",
                hint="" if "use --backend" in reason else f"Use --backend {able[0]}",
            )
        failed = [result for result in self.refused if self._refusal(result.name, self.plan.quant) is None]
        for name in _quickest_first(plugins.names("backends")):
            if not failed and (why := self._format_refused(name)):
                another = f" with --backend {name}" if named not in ("auto", name) else ""
                return UsageError(
                    f"no backend has a form of {self.plan.quant} for this model; {name}: {why}",
                    where="--quant",
                    hint=""
                    if "--quant none" in why
                    else f"--quant none{another} keeps the weights as they are",
                )
        here = [
            result for result in self.refused if plugins.why_not("backends", result.name.split()[0]) is None
        ]
        apart = [result for result in here if result.why != self.original.no_program]
        nearest = (failed or apart or here or self.refused)[-1]
        others = ", ".join(result.name for result in self.refused if result is not nearest)
        advice = "'infer doctor' says what is here"
        hint = f"{others} can't either: {advice}" if others else advice
        return NotUsableError(f"no backend can run this model; {nearest.name}: {nearest.why}", hint=hint)

    def _format_refused(self, name: str) -> str | None:
        """Return why a backend refuses the format, where it takes the model unquantized."""
        if self.plan.quant == "none" or plugins.why_not("backends", name) is not None:
            return None
        return self._refusal(name, self.plan.quant) if self._refusal(name, "none") is None else None

    def _refusal(self, label: str, quant: str) -> str | None:
        """Return why a backend, which `label` begins with, does not try the model at all."""
        name = label.split()[0]
        plan = self.plan.with_(backend=name, quant=quant)
        return plugins.why_not("backends", name) or encoder_decoder_graphs.refusal(
            plugins.get("backends", name), self.floats.lowered_as(self.small.shape), plan
        )

    def names(self) -> set[str]:
        """Return the backends that were tried or refused."""
        return {trial.backend for trial in self.trials} | {result.name for result in self.refused}

    def time(self) -> None:
        """Time the trials not timed yet; one that fails at a batch size of the plan is dropped."""

        def failed(trial: Trial, error: Exception) -> None:
            self.trials.remove(trial)
            self._failed(trial.backend, "time", error, [])

        new = [trial for trial in self.trials if not trial.latency]
        with self.rules.alone():
            findings = time_trials(
                self.plan, self.original, new, self.floats, self.reporter.step, failed, self.rules
            )
        self.reporter.found(findings)

    def lost_to_plain_torch(self) -> bool:
        """Return True when every timed trial is slower than torch eager at a batch size and eager was not tried."""
        timed = [t for t in self.trials if t.latency]
        absent = all(t.backend != "eager" for t in self.trials)
        return bool(timed) and absent and all(t.loses_to(EAGER) for t in timed)

    def _failed(self, name: str, stage: str, error: Exception, others: list[str]) -> None:
        """Record a backend's failure; raise it where this backend was requested by name."""
        refusal = library_errors.as_backend_error(name, stage, error, others)
        if self.plan.backend != "auto" or not isinstance(refusal, NotUsableError | ResourceError):
            raise refusal from (None if refusal is error else error)
        self.full = refusal if isinstance(refusal, ResourceError) else self.full
        self.refuse(name, str(refusal))

    def refuse(self, name: str, why: str, *, skipped: bool = False) -> None:
        """Record why a backend was not tried or did not run; no `name` means all of them."""
        label = f"{name} {self.dtype}".strip()
        outcome: Literal["skipped", "refused"] = "skipped" if skipped else "refused"
        self.refused.append(BackendResult(label, outcome, None, why, self.dtype))
        self.reporter.found([self.refused[-1].finding()])

    def close(self) -> None:
        """Close the trials and delete their files, before another attempt with raised layers."""
        for trial in self.trials:
            _discard(trial)


def _judged(
    plan: Plan, attempt: Callable[[Mapping[str, str]], Trial], options: Mapping[str, str]
) -> tuple[Trial | Exception, str | None]:
    """Return a trial, or the refusal of its backend, and why it can't be published; None where it can."""
    try:
        trial = attempt(options)
    except BehindError as error:
        if not options:
            raise
        return error, str(error)
    except Exception as error:  # raised by the caller where no option helps
        if isinstance(error, InferError) and not isinstance(error, NotUsableError):
            raise
        return error, f"it refuses the graph: {library_errors.describe(error)}"
    return trial, trial.unfaithful(plan)


def _discard(outcome: Trial | Exception) -> None:
    if isinstance(outcome, Trial):
        outcome.close()
        shutil.rmtree(outcome.folder.parent)


@dataclass
class _Steps:
    """Reporter that remembers the step of a trial that was begun last."""

    reporter: Reporter
    name: str = ""

    def step(self, name: str, detail: str) -> None:
        self.name = name
        self.reporter.step(name, detail)


def _other_backends(name: str, graph: Graph, plan: Plan) -> list[str]:
    """List the backends that may lower a graph that this one failed with."""
    return [
        other
        for other in _quickest_first(plugins.names("backends"))
        if other != name
        and plugins.why_not("backends", other) is None
        and plugins.get("backends", other).refuses(graph, plan.with_(backend=other)) is None
    ]


def candidates(plan: Plan, *, steps: bool = False) -> list[str]:
    """List the backends to try: the one asked for; of "auto" all of them, plain torch only when no other one can.

    Of a language model (`steps`) "auto" means those that can generate.
    """
    if plan.backend != "auto":
        return [plan.backend]
    names = [n for n in plugins.names("backends") if not steps or plugins.get("backends", n).STEPS]
    return sorted(_quickest_first(names), key=lambda n: (n == "eager", plugins.compiles(n)))


def _quickest_first(names: Iterable[str]) -> list[str]:
    """Sort backends by name, ONNX Runtime before all: it lowers in the shortest time, and takes most graphs."""
    return sorted(names, key=lambda name: (name != "ort", name))
