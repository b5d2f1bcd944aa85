"""Trials of one process: each is one `optimize` of a source that was loaded, captured and calibrated once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from ...artifact import store
from ...compress import assign
from ...errors import InferError, SourceError, UsageError
from ...library_errors import as_resource_error
from ...onnx.ort_session import limited_calls
from ...plan import Plan
from ...report.measurements.forked_memory import ForkingProbe
from ...report.rendering import formatting
from ...report.search_record import Candidate, Measured, Outcome, TrialRecord
from ...reporter import Reporter
from ...run import stages
from ...run.resolve_plan import Resolved
from ...run.stages import Made, Opened, Run
from ...run.trial_timing import TimingRules
from . import trial_result
from .lower_bounds import lower_bounds
from .messages import LowerBounds, Setup, ToBeat, TrialRequest
from .round_timing import time_artifacts
from .source_cache import PreparedSource, SourceCache, SourceFailure
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

    def run(self, request: TrialRequest) -> TrialRecord:
        """Run one trial as `optimize` does and publish its artifact in a folder of its own.

        A refusal of a backend, a format or a gate is an outcome. Raises the `InferError` that every trial would meet.
        """
        plan = request.candidate.plan(self._setup.plan)
        output = self._setup.artifact(request.number)
        shutil.rmtree(output.parent, ignore_errors=True)
        with self._lock.working(), limited_calls():
            try:
                return self._run(plan, request, output)
            except SourceFailure as failure:
                raise failure.error from failure
            except SourceError:
                raise
            except InferError as error:
                outcome, reason = trial_result.outcome(error), trial_result.sentence(error)
                return self._record(request, plan, outcome, reason)
            except Exception as error:
                if (refusal := as_resource_error(error)) is None:
                    raise
                return self._record(request, plan, trial_result.outcome(refusal), str(refusal))

    def _run(self, plan: Plan, request: TrialRequest, output: Path) -> TrialRecord:
        """Quantize, lower, judge and time a candidate, and publish it unless it is refused or known to lose."""
        reporter = self._reporter.attempt()
        prepared, resolved = self._opened(plan, reporter)
        to_beat, rivals = request.to_beat, request.rivals
        self._sources.open_float_forms(prepared, resolved.plan, rivals or ())
        reporter.findings[:0] = prepared.findings
        resolved = stages.within_sizes(resolved, prepared.original.graph)
        with store.stage(output, replace=False) as folder:
            assignment = prepared.assignment(resolved.plan, reporter)
            if to_beat is not None and (lost := _lost_by_layers(assignment, to_beat, reporter)) is not None:
                return self._record(request, resolved.plan, "skipped", *lost)
            rules = TimingRules(
                rivals=None if rivals is None else frozenset(rivals),
                to_beat=None if to_beat is None else to_beat.times,
                uses_bounds=False,
                alone=self._lock.timing,
                patience=prepared.patience,
            )
            run = Run(folder, reporter, self._memory, rules)
            opened = Opened(resolved, prepared.original, prepared.floats)
            made = run.make(opened, assignment, prepared.last_model)
            trial = made.best
            measured = trial_result.measured(trial, assignment.layer_seconds, assignment.layer_gain)
            if (record := self._unpublished(request, made, measured)) is not None:
                trial.close()
                return record
            if trial.slower:
                trial.kept_by = self._setup.keeps_slower
                made = _allowing_slower(made)
            if trial_result.is_far(trial, to_beat):
                trial.close()
                measured = structs.replace(measured, complete=False)
                return self._record(request, made.plan, "published", trial.verdict, measured)
            measured = trial_result.published(measured, run.publish(made, output).report)
        record = self._record(request, made.plan, "published", trial.verdict, measured)
        return record if self._metric is None else self._scored(record, self._metric, output, reporter)

    def _unpublished(self, request: TrialRequest, made: Made, measured: Measured) -> TrialRecord | None:
        """Return the record of a trial that is unfaithful or lost; None for one to publish."""
        trial, plan = made.best, made.plan
        if (reason := trial.unfaithful(plan)) is not None:
            reason = f"not faithful enough: {reason}" + (f"; {made.stuck}" if made.stuck else "")
            measured = structs.replace(measured, faithful=False)
            return self._record(request, plan, "refused", reason, measured)
        is_original = not trial.changed and not plan.backend_options
        if is_original and made.opened.original.is_in_memory:
            self._sources.keep_float_form(trial, plan)
            made.opened.floats.keep_seconds(trial)
        if request.to_beat is None or not (reason := trial_result.lost(trial, measured, request.to_beat)):
            return None
        return self._record(request, plan, "skipped", reason, measured)

    def _scored(
        self, record: TrialRecord, metric: UserMetric, artifact: Path, reporter: Reporter
    ) -> TrialRecord:
        """Add the user's score to a published trial; one that the metric refuses is refused.

        Raises `SourceFailure` where the metric refuses the float model, and so every trial.
        """
        reporter.step("score", self._setup.metric or "")
        try:
            score = metric.score(artifact)
        except (SourceError, UsageError) as error:
            if record.candidate.quant == "none":
                raise SourceFailure(error) from error
            return structs.replace(record, outcome="refused", reason=trial_result.sentence(error))
        measured = structs.replace(record.measured or Measured(), score=score)
        return structs.replace(record, measured=measured)

    def _record(
        self,
        request: TrialRequest,
        plan: Plan,
        outcome: Outcome,
        reason: str,
        measured: Measured | None = None,
    ) -> TrialRecord:
        """Make the record of a trial, with a command whose output is beside that of the search."""
        candidate = request.candidate
        label = re.sub(r"[^a-z0-9.]+", "-", candidate.label.lower()).strip("-")
        command = formatting.command(plan, f"{Path(self._setup.name).stem}-{label}.infer")
        return TrialRecord(
            candidate=candidate, outcome=outcome, reason=reason, measured=measured, command=command
        )

    def survey(self, candidate: Candidate, formats: Sequence[str]) -> LowerBounds:
        """Return the lower bounds of formats, of the source as it is loaded for `candidate`; none where it can't be
        opened, which the trials will report.
        """
        plan = candidate.plan(self._setup.plan)
        with self._lock.working():
            try:
                prepared, run = self._opened(plan, self._reporter.attempt())
                run = stages.within_sizes(run, prepared.original.graph)
                with self._lock.timing():
                    return lower_bounds(prepared.original, run.plan, formats)
            except (InferError, SourceFailure):
                return LowerBounds()

    def rounds(
        self, candidate: Candidate, artifacts: Sequence[str], batches: Sequence[int]
    ) -> list[list[float]]:
        """Time published artifacts in turns, each at its own batch size, the first one that of `candidate`; return
        seconds of a row by artifact and round.
        """
        plan = candidate.plan(self._setup.plan)
        with self._lock.working():
            prepared = self._sources.last or self._opened(plan, self._reporter.attempt())[0]
            self._reporter.step("time", "the best trials in turns")
            return time_artifacts(
                [Path(artifact) for artifact in artifacts],
                batches,
                prepared.original.graph,
                self._lock.timing,
            )

    def _opened(self, plan: Plan, reporter: Reporter) -> tuple[PreparedSource, Resolved]:
        """Resolve the plan, and load and capture the source unless an earlier trial did."""
        return self._sources.prepare(stages.resolve_here(plan, reporter), reporter)


def _allowing_slower(made: Made) -> Made:
    """Return what was made with a plan that keeps a slower artifact, as its command has to."""
    resolved = made.opened.resolved
    resolved = replace(resolved, plan=resolved.plan.with_(allow_slower=True))
    return replace(made, opened=replace(made.opened, resolved=resolved))


def _lost_by_layers(
    assignment: assign.Assignment, to_beat: ToBeat, reporter: Reporter
) -> tuple[str, Measured] | None:
    """Time the layers of a format alone where that can decide; return why a trial can't come near, and their times;
    None for one that may.
    """
    sizes = to_beat.least_gain or to_beat.most_layers
    if not sizes:
        return None
    reporter.step("dispatch", "all layers at the batch sizes that decide")
    alone = assign.layers_alone(assignment, sorted(sizes))
    if not (reason := trial_result.lost_by_layers(alone.seconds, alone.gain, to_beat)):
        return None
    if assignment.timer is not None:
        assignment.timer.save()
        assignment.timer.close()
    return reason, Measured(layer_seconds=alone.seconds, layer_gain=alone.gain)
