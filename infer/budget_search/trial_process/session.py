"""Trials of one process: each is one `optimize` of a source that was loaded, captured and calibrated once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from ...artifact import store
from ...compress import assign
from ...errors import InferError, SourceError, UsageError
from ...graph.program import TorchGraph
from ...library_errors import as_resource_error
from ...onnx.ort_session import limited_calls
from ...plan import Plan
from ...report.measurements.forked_memory import ForkingProbe
from ...report.rendering import formatting
from ...report.search_record import Candidate, Measured
from ...reporter import Reporter
from ...run import stages
from ...run.resolve_plan import Resolved
from ...run.stages import Made, Opened, Run
from ...run.trial_timing import TimingRules
from . import trial_result
from .lower_bounds import lower_bounds
from .messages import Done, LowerBounds, Rounds, RoundTimes, Setup, Survey, ToBeat, TrialRequest
from .round_timing import time_artifacts
from .source_cache import PreparedSource, SourceCache, SourceFailure, TrialReporter
from .timing_lock import TimingLock
from .user_metric import UserMetric


class Session:
    """Runs trials one after the other; `reporter` receives the steps of each, `waiting` see `TimingLock`."""

    def __init__(
        self, setup: Setup, reporter: Reporter, waiting: Callable[[bool], None] | None = None
    ) -> None:
        self._setup, self._reporter = setup, reporter
        self._work = Path(setup.work)
        self._sources = SourceCache(self._work)
        self._lock = TimingLock(reporter.step, waiting=waiting)
        self._memory = ForkingProbe()
        self._metric = UserMetric(setup.metric) if setup.metric else None

    def run(self, request: TrialRequest) -> Done:
        """Run one trial as `optimize` does and publish its artifact in a folder of its own.

        A refusal of a backend, a format or a gate is an outcome. Raises `SourceFailure` for what no trial can cure.
        """
        plan = request.candidate.plan(self._setup.plan)
        plan = plan.with_(batches=()) if request.judge_only else plan
        place = self._work / f"trial-{request.number}"
        shutil.rmtree(place, ignore_errors=True)
        with self._lock.working(), limited_calls():
            try:
                return self._run(plan, request, place / self._setup.name)
            except SourceError as error:
                raise SourceFailure(error) from error
            except InferError as error:
                command = _command(plan, request.candidate, self._setup.name)
                return Done(
                    outcome=trial_result.outcome(error), reason=trial_result.sentence(error), command=command
                )
            except Exception as error:
                if (refusal := as_resource_error(error)) is None:
                    raise
                return Done(outcome=trial_result.outcome(refusal), reason=str(refusal))

    def _run(self, plan: Plan, request: TrialRequest, output: Path) -> Done:
        """Quantize, lower, judge and time a candidate, and publish it unless it is refused or known to lose."""
        reporter = TrialReporter(self._reporter)
        prepared, resolved = self._opened(plan, reporter)
        to_beat, rivals = request.to_beat, request.rivals
        self._sources.open_float_forms(prepared, resolved.plan, rivals or ())
        reporter.findings[:0] = prepared.findings
        resolved = stages.within_sizes(resolved, prepared.original.graph)
        with store.stage(output, replace=False) as folder:
            assignment = prepared.assignment(resolved.plan, reporter)
            lost = _lost_by_layers(assignment, to_beat, reporter)
            if lost is not None and not lost.judged:
                return Done(
                    outcome="skipped",
                    reason=lost.reason,
                    measured=lost.alone,
                    command=_command(resolved.plan, request.candidate, self._setup.name),
                )
            rules = TimingRules(
                rivals=None if rivals is None else frozenset(rivals),
                to_beat=None if to_beat is None else trial_result.times_to_beat(to_beat),
                is_timed=lost is None,
                uses_bounds=False,
                alone=self._lock.timing,
                patience=prepared.patience,
            )
            run = Run(folder, reporter, self._memory, rules)
            opened = Opened(resolved, prepared.original, prepared.floats)
            made = run.make(opened, assignment, prepared.last_model)
            trial = made.best
            measured = trial_result.measured(trial, assignment.layer_seconds, assignment.layer_gain)
            if (done := self._unpublished(made, measured, request, lost)) is not None:
                trial.close()
                return done
            if trial.slower:
                trial.kept_by = self._setup.keeps_slower
                made = _allowing_slower(made)
            if trial_result.is_far(trial, to_beat):
                trial.close()
                command = _command(made.plan, request.candidate, self._setup.name)
                measured = structs.replace(measured, complete=False)
                return Done(outcome="published", reason=trial.verdict, measured=measured, command=command)
            published = run.publish(made, output)
        done = Done(
            outcome="published",
            reason=trial.verdict,
            measured=trial_result.published(measured, published.report),
            artifact=str(output),
            command=_command(made.plan, request.candidate, output.name),
        )
        return done if self._metric is None else self._scored(done, self._metric, made.plan, reporter)

    def _unpublished(
        self, made: Made, measured: Measured, request: TrialRequest, by_layers: LostByLayers | None
    ) -> Done | None:
        """Return the result of a trial that is unfaithful, is not to be timed here or lost; None for one to publish."""
        trial, plan = made.best, made.plan
        command = _command(plan, request.candidate, self._setup.name)
        if (reason := trial.unfaithful(plan)) is not None:
            reason = f"not faithful enough: {reason}" + (f"; {made.stuck}" if made.stuck else "")
            measured = structs.replace(measured, faithful=False)
            return Done(outcome="refused", reason=reason, measured=measured, command=command)
        if request.judge_only:
            return Done(outcome="skipped", reason="faithful; times are taken elsewhere", measured=measured)
        if by_layers is not None:
            alone = by_layers.alone
            measured = structs.replace(
                measured, layer_seconds=alone.layer_seconds, layer_gain=alone.layer_gain, complete=False
            )
            return Done(outcome="skipped", reason=by_layers.reason, measured=measured, command=command)
        is_original = not trial.changed and not plan.backend_options
        if is_original and isinstance(made.opened.original.graph, TorchGraph):
            self._sources.keep_float_form(trial, plan)
            made.opened.floats.keep_seconds(trial)
        if request.to_beat is None or not (reason := trial_result.lost(trial, measured, request.to_beat)):
            return None
        return Done(outcome="skipped", reason=reason, measured=measured, command=command)

    def _scored(self, done: Done, metric: UserMetric, plan: Plan, reporter: Reporter) -> Done:
        """Add the user's score to a published trial; one that the metric refuses is refused.

        Raises `SourceFailure` where the metric refuses the float model, and so every trial.
        """
        reporter.step("score", self._setup.metric or "")
        try:
            score = metric.score(Path(done.artifact))
        except (SourceError, UsageError) as error:
            if plan.quant == "none":
                raise SourceFailure(error) from error
            return structs.replace(done, outcome="refused", reason=trial_result.sentence(error), artifact="")
        measured = structs.replace(done.measured or Measured(), score=score)
        return structs.replace(done, measured=measured)

    def survey(self, survey: Survey) -> LowerBounds:
        """Return the lower bounds of formats; none where the source can't be opened, which the trials will report."""
        plan = survey.candidate.plan(self._setup.plan)
        with self._lock.working():
            try:
                prepared, run = self._opened(plan, TrialReporter(self._reporter))
                run = stages.within_sizes(run, prepared.original.graph)
                with self._lock.timing():
                    return lower_bounds(prepared.original, run.plan, survey.formats)
            except (InferError, SourceFailure):
                return LowerBounds()

    def rounds(self, asked: Rounds) -> RoundTimes:
        """Time published artifacts in turns with each other."""
        plan = asked.candidate.plan(self._setup.plan)
        with self._lock.working():
            prepared = self._sources.last or self._opened(plan, TrialReporter(self._reporter))[0]
            self._reporter.step("time", "the best trials in turns")
            folders = [Path(name) for name in asked.artifacts]
            return time_artifacts(folders, asked.batches, prepared.original.graph, self._lock.timing)

    def _opened(self, plan: Plan, reporter: Reporter) -> tuple[PreparedSource, Resolved]:
        """Resolve the plan, and load and capture the source unless an earlier trial did."""
        return self._sources.prepare(stages.resolve_here(plan, reporter), reporter)


def _allowing_slower(made: Made) -> Made:
    """Return what was made with a plan that keeps a slower artifact, as its command has to."""
    resolved = made.opened.resolved
    resolved = replace(resolved, plan=resolved.plan.with_(allow_slower=True))
    return replace(made, opened=replace(made.opened, resolved=resolved))


@dataclass(frozen=True)
class LostByLayers:
    """Reason that a trial can't come near the best one by what its layers take alone, and their times.

    `judged`: its format may win on another backend, so that its fidelity is measured.
    """

    reason: str
    alone: Measured
    judged: bool


def _lost_by_layers(
    assignment: assign.Assignment, to_beat: ToBeat | None, reporter: Reporter
) -> LostByLayers | None:
    """Time the layers of a format alone where that can decide; return None for a trial that may come near."""
    if to_beat is None or not (sizes := to_beat.gain_needed or to_beat.most_layers or to_beat.own_layers):
        return None
    reporter.step("dispatch", "all layers at the batch sizes that decide")
    alone = assign.layers_alone(assignment, sorted(sizes))
    label, judged = to_beat.label, False
    reason = trial_result.gains_too_little(alone.gain, to_beat)
    if alone.gain:  # else not all layers were timed
        reason = reason or trial_result.layers_too_slow(alone.seconds, to_beat.most_layers, label)
        if not reason:
            reason = trial_result.layers_too_slow(alone.seconds, to_beat.own_layers, label)
            judged = bool(reason)
    if not reason:
        return None
    if assignment.timer is not None and not judged:
        assignment.timer.save()
        assignment.timer.close()
    return LostByLayers(reason, Measured(layer_seconds=alone.seconds, layer_gain=alone.gain), judged)


def _command(plan: Plan, candidate: Candidate, name: str) -> str:
    """Return the command that makes a trial, with an output beside that of the search: `model-ort-int8.infer`."""
    label = re.sub(r"[^a-z0-9.]+", "-", candidate.label.lower()).strip("-")
    return formatting.command(plan, f"{Path(name).stem}-{label}.infer")
