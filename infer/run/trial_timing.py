"""Timing of trials against the fastest float form, interleaved in one run.

Float forms are the user's own module in plain torch, always, and the float graph on the requested backend. For
`--backend auto` they are the float graph on every backend that may win, inductor (torch.compile) always included. A
model of tensors is timed as it will be called, through the input checks of `Predictor.predict`; a float form without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from .. import latency, library_errors, plugins
from ..device.processors import MOST_MISSING, OtherLoad, wait_until_quiet
from ..errors import InferError, SourceError
from ..graph.program import FileGraph, Graph, StreamedGraph
from ..graph.typical_inputs import timed_lengths, typical_inputs
from ..latency import WORKLOAD, Paired, Timing
from ..llm.step.full_sequence_runner import FullSequenceRunner
from ..plan import Plan
from ..predict.tensors import CheckedRunner
from ..report.measurements import step_breakdown
from ..report.rendering import formatting
from ..spec import Finding
from . import compilation_bounds
from .float_reference import EAGER, FLOAT_FORM, ONNX_RUNTIME, OPENVINO, FloatReferences
from .original_runners import Eager
from .trial import TimesToBeat, Trial

HOPELESS = 4.0  # times the fastest trial: then the float form of its backend isn't worth lowering
BEHIND = 1.5  # times another trial, in brief timings: at all batch sizes it is not compared, in all few pairs are made
PAIR_SECONDS = 4.0  # that an undecided pair is timed for
UNCHANGED_SECONDS = 1.0  # the same of a model that is not quantized, which no gate refuses for being slower
PAIRS = 200  # after which a pair of short calls ends
SHORT_PAIRS, SHORT_SECONDS = 5, 0.5  # of the first round of a trial that has another one to beat
# Times the other one's ratio, with the whole interval: there are no more rounds, and a trial recorded as lost still is.
LOST = 1.1
FAR = 2.0  # times the same: other batch sizes are not timed and no artifact is made, as noise does not explain it
WAITED, MOST_WAITED = 3.0, 20.0  # times what was timed, and seconds, of all waiting for others in a run
AGAIN = 3  # times that a disturbed pair is made
NEAR = 1.5  # times the fastest float form, in brief timings: one that may be the fastest all the same
LOST_BRIEFLY = 1.15  # times a float form, in brief timings, from which on no faster one has to be found
BRIEF_SECONDS = 0.1  # that a runner is timed for at each batch size before it is known which ones are paired
FASTEST = "the fastest float form"


@dataclass(frozen=True)
class FloatForm:
    """A float form with its median seconds per call by batch size."""

    name: str
    runner: Any
    seconds: Mapping[int, float]


@dataclass
class Patience:
    """Seconds that a run was timed for and waited for other processes between pairs, which bound each other."""

    timed: float = 0.0
    waited: float = 0.0

    @property
    def left(self) -> float:
        """Seconds that it may still wait."""
        return min(MOST_WAITED, WAITED * self.timed) - self.waited


@dataclass(frozen=True)
class TimingRules:
    """Rules by which trials are timed: of a run alone by default, in a search by what it knows of its other trials.

    `rivals`: backends whose float form is worth making; None: all that the plan names. `to_beat`: what another trial
    takes. `uses_bounds`: a backend that compiles is left out where its kernels alone take too long. `alone`: entered
    while something is timed.
    """

    rivals: frozenset[str] | None = None
    to_beat: TimesToBeat | None = None
    uses_bounds: bool = True
    alone: Callable[[], AbstractContextManager[object]] = nullcontext
    patience: Patience = field(default_factory=Patience)


def time_trials(
    plan: Plan,
    original: Graph,
    trials: Sequence[Trial],
    floats: FloatReferences,
    step: Callable[[str, str], None],
    failed: Callable[[Trial, Exception], None],
    rules: TimingRules | None = None,
) -> list[Finding]:
    """Fill `latency` and `baseline` of every faithful trial; return findings with the times of the float forms.

    `plan.backend` is the requested backend. Trials that the fidelity gate refuses are not timed. `failed` is called
    with each trial that can't run at the batch sizes of the plan, and its error.
    """
    rules = rules or TimingRules()
    judged = [t for t in trials if t.unfaithful(plan) is None and not t.ahead_of_time]
    if not plan.batches or not judged:
        return []
    step("time", ", ".join(t.backend for t in judged))
    for trial in judged:
        try:
            _time_briefly(trial, original, plan)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is its backend's refusal
            failed(trial, error)
    judged = [t for t in judged if t.brief]
    fastest = min((sum(t.brief.values()) for t in judged), default=0.0)
    findings: list[Finding] = []
    for shape in {t.shape for t in judged}:
        own = [t for t in judged if t.shape == shape]
        backends = _worth_lowering(plan, original, {t.backend: sum(t.brief.values()) for t in own})
        compiled = [name for name in backends if plugins.compiles(name)]
        asked, known = plan.with_(backend=own[0].backend), floats.seconds.setdefault(shape, {})
        cheap = [name for name in backends if name not in compiled]
        runners, absent = floats.forms(asked, cheap, shape, step, rules.rivals)
        forms = _time_float_forms(runners, known, original, plan)
        if compiled and own[0].changed:
            reason = _why_no_baseline(plan, original, forms, own)
            if reason:
                findings += [Finding("time", f"no {name}{FLOAT_FORM}", None, why=reason) for name in compiled]
            else:
                runners, more = floats.forms(asked, backends, shape, step, rules.rivals)
                forms, absent = _time_float_forms(runners, known, original, plan), more
        findings += [*absent, *(_finding(form) for form in forms)]
        behind = {t.name for t in own if sum(t.brief.values()) > BEHIND * fastest and len(judged) > 1}
        limits = [_pair_limits(trial, briefly=trial.name in behind) for trial in own]
        needed = [_seconds_needed(t, forms, limit) for t, limit in zip(own, limits, strict=True)]
        pairs = _Pairs(plan, original, forms, rules)
        for i, trial in enumerate(own):
            trial.forms = {form.name: dict(form.seconds) for form in forms}
            trial.baseline = pairs.baseline()
            step("time", f"{trial.backend} against {trial.baseline}, about {sum(needed[i:]):.0f} s left")
            pairs.time(trial, limits[i])
    return findings


def _pair_limits(trial: Trial, *, briefly: bool) -> dict[str, Any]:
    """Return the limits of `latency.paired` for a trial; `briefly` where another one is faster anyway."""
    if briefly:
        return {"min_pairs": SHORT_PAIRS, "max_seconds": SHORT_SECONDS}
    if not trial.changed:
        return {"min_pairs": SHORT_PAIRS, "max_seconds": UNCHANGED_SECONDS}
    return {"min_pairs": latency.MIN_PAIRS, "max_seconds": PAIR_SECONDS, "max_pairs": PAIRS}


def _seconds_needed(trial: Trial, forms: Sequence[FloatForm], limits: Mapping[str, float]) -> float:
    """Return about how long a trial is timed: pairs are made until a limit of time, of long calls a few."""
    least, most = limits["min_pairs"], limits["max_seconds"]
    pairs = [seconds + min(form.seconds[batch] for form in forms) for batch, seconds in trial.brief.items()]
    return sum(
        max(
            min(most, PAIRS * pair),
            min(least * pair, max(latency.OVERTIME * most, latency.LEAST_PAIRS * pair)),
        )
        for pair in pairs
    )


def _worth_lowering(plan: Plan, original: Graph, took: Mapping[str, float]) -> list[str]:
    """Return the backends whose float form is lowered; plain torch is timed in any case.

    For "auto" these are the backends whose trial took at most `HOPELESS` times the fastest one, and inductor.
    """
    if plan.backend != "auto" or isinstance(original, FileGraph | StreamedGraph):
        return list(took)
    limit = HOPELESS * min(took.values())
    found = [name for name, seconds in took.items() if seconds <= limit and name != "eager"]
    if "inductor" not in found and plugins.why_not("backends", "inductor") is None:
        found.append("inductor")
    return found


def _why_no_baseline(plan: Plan, original: Graph, forms: Sequence[FloatForm], trials: Sequence[Trial]) -> str:
    """Return why no form that is compiled can change the verdict, "" where one may: each trial has lost already, or
    the kernels that compilation does not change take as long as another form; of a language model's steps, whose float
    form takes minutes to compile, as a trial.
    """
    if plan.device != "cpu" or isinstance(original, StreamedGraph):
        return ""
    if trials[0].shape is not None:
        return _why_no_float_step(forms, trials)
    if isinstance(original, FileGraph):
        return ""
    least = {batch: min(form.seconds[batch] for form in forms) for batch in plan.batches}
    if all(any(trial.brief[batch] > LOST_BRIEFLY * least[batch] for batch in least) for trial in trials):
        return "every trial takes longer than another float form"
    runner = Eager(original)
    for batch, seconds in least.items():
        bound = compilation_bounds.of_call(_unchecked(runner, original, batch))
        if bound.seconds * compilation_bounds.SLACK < seconds:
            return ""
    return (
        f"its kernels alone take {formatting.seconds(bound.seconds)} at batch {batch}, more than another form"
    )


def _why_no_float_step(forms: Sequence[FloatForm], trials: Sequence[Trial]) -> str:
    """Return why compiling the float step can't make it as fast as one of the trials at any batch size."""
    plain = next((form.runner for form in forms if isinstance(form.runner, FullSequenceRunner)), None)
    if plain is None:
        return ""
    said = ""
    for batch in trials[0].brief:
        bound = compilation_bounds.of_call(plain.decoding(batch))
        best = min(trial.brief[batch] for trial in trials)
        if bound.seconds * compilation_bounds.SLACK < best:
            return ""
        took = formatting.seconds(bound.seconds)
        said = f"its kernels alone take {took} at batch {batch}, the model in all {formatting.seconds(best)}"
    return said


def why_not_compiled(plan: Plan, original: Graph, runner: Any, trials: Sequence[Trial]) -> str:
    """Return why compiling the graph of `runner`, in plain torch, can't give the fastest trial; "" where it may."""
    rivals = [t for t in trials if t.unfaithful(plan) is None and not t.ahead_of_time]
    try:
        for trial in rivals:
            _time_briefly(trial, original, plan)
    except Exception:  # noqa: BLE001 - it is timed again, and refused, with the others
        return ""
    said = ""
    for batch in plan.batches if rivals else ():
        bound = compilation_bounds.of_call(_unchecked(runner, original, batch))
        best, name = min((trial.brief[batch], trial.name) for trial in rivals)
        alone = f"its kernels take {formatting.seconds(bound.seconds)} alone at batch {batch}"
        if bound.seconds * compilation_bounds.SLACK >= best:
            said = f"{alone}, {name} {formatting.seconds(best)} in all"
        elif name == "eager" and bound.share >= compilation_bounds.ENOUGH:
            said = f"{alone}, {bound.share:.0%} of a call of plain torch: compilation gains too little"
        else:
            return ""
    return said


def _unchecked(runner: Any, original: Graph, batch: int) -> Callable[[], Any]:
    inputs = typical_inputs(original.inputs, original.samples, original.sizes, batch)
    return lambda: runner.run(inputs)


def _time_float_forms(
    runners: Mapping[str, Any], known: dict[str, dict[int, float]], original: Graph, plan: Plan
) -> list[FloatForm]:
    """Time the float forms in turns; `known` keeps their seconds for the trials that come after."""
    if not runners.keys() <= known.keys():
        for batch in plan.batches:
            calls = [call_of(runner, original, batch) for runner in runners.values()]
            try:
                times = latency.in_turns(calls, device=plan.device, min_seconds=BRIEF_SECONDS)
            except InferError:
                raise
            except Exception as error:
                if refusal := library_errors.as_resource_error(error):
                    raise refusal from error
                raise SourceError(
                    f"the float model itself fails on a batch of {batch}: {library_errors.describe(error)}",
                    hint=f"Time it at another size: --batch {2 * batch}",
                ) from error
            for name, taken in zip(runners, times, strict=True):
                known.setdefault(name, {})[batch] = taken.own
    return [FloatForm(name, runner, known[name]) for name, runner in runners.items()]


@dataclass(frozen=True)
class _Pairs:
    """Pairs of calls of trials and of the float forms of one original."""

    plan: Plan
    original: Graph
    forms: Sequence[FloatForm]
    rules: TimingRules

    @property
    def rivals(self) -> dict[int, FloatForm]:
        """The form that is fastest at each batch size."""
        return {
            batch: min(self.forms, key=lambda form: form.seconds[batch])  # noqa: B023
            for batch in self.plan.batches
        }

    def baseline(self, rivals: Mapping[int, str] | None = None) -> str:
        """Name the rivals: `the fastest float form (inductor float32)`, only its name where there was no other."""
        names = rivals or {batch: form.name for batch, form in self.rivals.items()}
        each = ", ".join(f"{name} at batch {batch}" for batch, name in names.items())
        which = each if len(set(names.values())) > 1 else next(iter(names.values()))
        return f"{FASTEST} ({which})" if len(self.forms) > 1 else which

    def time(self, trial: Trial, limits: Mapping[str, Any]) -> None:
        """Time a trial in pairs with the form that is fastest at each batch size.

        With `to_beat`, what another trial takes, a short round comes first, and the full one only for a trial that did
        not lose it: successive halving in two steps (Jamieson and Talwalkar 2016, "Non-stochastic best arm
        identification"). A batch size at which the short round ended where the full one would is not timed again.
        """
        short: list[Timing] = []
        if self.rules.to_beat is not None:
            if self._lost_short_round(trial, self.rules.to_beat):
                return
            short, trial.latency = trial.latency, []
        enough = {timing.batch: timing for timing in short if latency.is_enough(timing.pair, **limits)}
        for batch, rival in self.rivals.items():
            timing = enough.get(batch) or self._timing(trial, batch, rival, limits)
            trial.latency.append(self._confirmed(timing, trial, limits))
        trial.baseline = self.baseline({t.batch: t.rival for t in trial.latency})
        if not isinstance(trial.runner, FullSequenceRunner):
            return
        for batch in self.plan.batches:
            if parts := step_breakdown.of_call(trial.runner.decoding(batch), batch):
                trial.steps.append(parts)
        rival = self.rivals[self.plan.batches[0]].runner
        if isinstance(rival, FullSequenceRunner):
            ours, theirs = (runner.reading(WORKLOAD.chunk) for runner in (trial.runner, rival))
            trial.prompt, _ = self._quietly(ours, theirs, {"max_seconds": PAIR_SECONDS})

    def _lost_short_round(self, trial: Trial, to_beat: TimesToBeat) -> bool:
        """Time a few pairs; return whether the trial lost. Float forms, which others are timed against, are timed at
        every batch size, others that lost by far only at those that decide.
        """
        limits = {"min_pairs": SHORT_PAIRS, "max_seconds": SHORT_SECONDS}
        for deciding in (True, False):
            for batch, rival in self.rivals.items():
                if (not trial.changed or to_beat.counts(batch)) is deciding:
                    trial.latency.append(self._timing(trial, batch, rival, limits))
            if (slower := trial.times_slower(to_beat) or 0.0) > FAR:
                break
        return slower > LOST

    def _timing(self, trial: Trial, batch: int, rival: FloatForm, limits: Mapping[str, Any]) -> Timing:
        """Time a trial in pairs with one float form at one batch size."""
        ours = call_of(trial.runner, self.original, batch, served=True)
        theirs = call_of(rival.runner, self.original, batch)
        pair, missing = self._quietly(ours, theirs, limits)
        if missing and _is_the_same(trial, rival):  # what they differ by is the disturbance
            pair = msgspec.structs.replace(pair, verdict=latency.NOISE)
        return Timing(batch, pair, rival.name, _lengths(trial, self.original, batch), missing)

    def _confirmed(self, timing: Timing, trial: Trial, limits: Mapping[str, Any]) -> Timing:
        """Return the timing against the form over which a trial that was faster gains least: brief timings chose its
        rival, and others within `NEAR` of it may be the fastest.
        """
        batch = timing.batch
        limit = NEAR * min(form.seconds[batch] for form in self.forms)
        near = [form for form in self.forms if form.name != timing.rival and form.seconds[batch] <= limit]
        for form in near:
            if timing.pair.verdict != "faster":
                break
            other = self._timing(trial, batch, form, limits)
            timing = max(timing, other, key=lambda one: one.pair.ratio)
        return timing

    def _quietly(
        self, ours: Callable[[], Any], theirs: Callable[[], Any], limits: Mapping[str, Any]
    ) -> tuple[Paired, float]:
        """Time in pairs; where other processes took the processors wait for them, for a bounded time, and do it again,
        at most `AGAIN` times in all.

        Returns the least disturbed pair and the processors that it missed: of one that was disturbed all the same what
        its shortest calls say.
        """
        made: list[tuple[float, Paired]] = []
        threads, device, patience = torch.get_num_threads(), self.plan.device, self.rules.patience
        for attempt in range(1, AGAIN + 1):
            load, began = OtherLoad(), time.perf_counter()
            pair = latency.paired(ours, theirs, device=device, **limits)
            patience.timed += time.perf_counter() - began
            missing = load.excess(threads) if device == "cpu" else 0.0
            if missing <= MOST_MISSING and not pair.is_wide:
                return pair, 0.0
            made.append((missing, pair))
            if (seconds := patience.left) <= 0 or attempt == AGAIN:
                break
            patience.waited += wait_until_quiet(threads, seconds)
        missing, pair = min(made, key=lambda one: one[0])
        return pair.undisturbed(), missing if missing > MOST_MISSING else 0.0


def _is_the_same(trial: Trial, rival: FloatForm) -> bool:
    """Return true where a trial runs the original in the same library with the same settings as its user does."""
    users = {("ort", ONNX_RUNTIME), ("openvino", OPENVINO), ("eager", EAGER)}
    return not trial.changed and not trial.cautious and (trial.backend, rival.name) in users


def _lengths(trial: Trial, original: Graph, batch: int) -> tuple[int, int] | None:
    """Return the shortest and the longest row that was timed; None without an attention mask."""
    if isinstance(trial.runner, FullSequenceRunner):
        return None
    found = timed_lengths(original.inputs, original.samples, original.sizes, batch)
    return None if found is None else (int(found.min()), int(found.max()))


def call_of(runner: Any, graph: Graph, batch: int, *, served: bool = False) -> Callable[[], Any]:
    """Return one call on a typical batch of the samples, or one decode step of a language model.

    With `served` the call goes through the input checks of the Predictor. Runtimes that take arrays are given them, as
    their users do: what tensors cost on their way there is no time of the user's.
    """
    if isinstance(runner, FullSequenceRunner):
        return runner.decoding(batch)
    inputs: dict[str, Any] = dict(typical_inputs(graph.inputs, graph.samples, graph.sizes, batch))
    run = getattr(runner, "run_arrays", None)
    if run is None or any(value.dtype == torch.bfloat16 for value in inputs.values()):
        run = runner.run
    else:
        inputs = {name: value.contiguous().numpy() for name, value in inputs.items()}
    if served:
        calls = CheckedRunner(graph.inputs, graph.outputs, graph.sizes, runner)
        return lambda: calls.predict(inputs)
    return lambda: run(inputs)


def times_behind(runner: Any, trial: Trial, graph: Graph, plan: Plan) -> float:
    """Return how many times the time of a trial a runner takes, in brief timings in turns, at the batch size where it
    does best; 0 where one of them fails.
    """
    ratios = []
    for batch in plan.batches:
        calls = [call_of(each, graph, batch, served=True) for each in (runner, trial.runner)]
        try:
            own, other = latency.in_turns(calls, device=plan.device, min_seconds=BRIEF_SECONDS)
        except Exception:  # noqa: BLE001 - it is compared, and what fails is told there
            return 0.0
        ratios.append(own.min / max(other.min, 1e-9))
    return min(ratios, default=0.0)


def _time_briefly(trial: Trial, graph: Graph, plan: Plan) -> None:
    """Set the median seconds of a trial's calls by batch size, from `BRIEF_SECONDS` of timing each.

    Only "auto" compares backends by it: for a named one a single call shows that it runs, and takes 0.
    """
    if trial.brief:
        return
    calls = {batch: call_of(trial.runner, graph, batch, served=True) for batch in plan.batches}
    limits: dict[str, Any] = {"min_seconds": BRIEF_SECONDS, "min_runs": 5, "max_runs": 300}
    took = dict.fromkeys(calls, 0.0)
    for batch, call in calls.items():
        if plan.backend == "auto":
            took[batch] = latency.measure(call, device=plan.device, **limits).own
        else:
            call()
    trial.brief = took


def _finding(form: FloatForm) -> Finding:
    each = ", ".join(f"{formatting.seconds(s)} at batch {batch}" for batch, s in form.seconds.items())
    return Finding("time", f"float form {form.name}", sum(form.seconds.values()), "s", each)
