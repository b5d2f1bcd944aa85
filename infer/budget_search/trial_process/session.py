"""Trials of one process: the source is loaded, captured and calibrated once, then each trial is one `optimize`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ... import compress, plugins
from ... import device as hardware
from ...artifact import store
from ...compress import assign
from ...errors import InferError, NotUsableError, SourceError, UsageError
from ...library_errors import as_resource_error
from ...pipeline import stages
from ...pipeline.float_graph import Original
from ...pipeline.float_reference import FloatReferences
from ...pipeline.llm_mode import refuse_backend
from ...pipeline.publish import publish
from ...pipeline.resolve_plan import Resolved, resolve, resolve_cache
from ...pipeline.trial import Trial
from ...plan import Plan
from ...report.measurements import roofline
from ...report.measurements.forked_memory import ForkingProbe
from ...report.rendering import formatting
from ...report.search_record import Candidate
from ...reporter import Reporter
from ...spec import Finding
from . import trial_result
from .lower_bounds import lower_bounds
from .messages import Done, LowerBounds, Request, Setup, Survey
from .timing_lock import TimingLock
from .user_metric import UserMetric

PACKED_SHARE = 0.1  # of the free memory, that packed weights may hold for trials to come


class SourceFailure(Exception):
    """The source, its data or an option is wrong: no trial can run. `error` says what."""

    def __init__(self, error: InferError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Prepared:
    """A source loaded and captured in one way, and what its trials share."""

    key: tuple[object, ...]
    original: Original
    floats: FloatReferences
    findings: list[Finding]
    stats: dict[tuple[str, str], Mapping[str, compress.Stats] | None] = field(default_factory=dict)
    packings: dict[str, compress.PackingCache] = field(default_factory=dict)  # by way of calibration


class Session:
    """Runs trials one after the other; `reporter` receives the steps of each, `waiting` see `TimingLock`."""

    def __init__(
        self, setup: Setup, reporter: Reporter, waiting: Callable[[bool], None] | None = None
    ) -> None:
        self._setup, self._reporter = setup, reporter
        self._work = Path(setup.work)
        self._prepared: Prepared | None = None
        self._lock = TimingLock(reporter.step, waiting=waiting)
        self._memory = ForkingProbe()
        self._metric = UserMetric(setup.metric) if setup.metric else None

    def run(self, request: Request) -> Done:
        """Run one trial as `optimize` does and publish its artifact in a folder of its own.

        A refusal of a backend, a format or a gate is an outcome. Raises `SourceFailure` for what no trial can cure.
        """
        plan = request.candidate.plan(self._setup.plan)
        plan = plan.with_(batches=()) if request.judge_only else plan
        place = self._work / f"trial-{request.number}"
        shutil.rmtree(place, ignore_errors=True)
        with self._lock.working():
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

    def _run(self, plan: Plan, request: Request, output: Path) -> Done:
        quiet = _Steps(self._reporter)
        prepared, run = self._opened(plan, quiet)
        prepared.floats.rivals = None if request.rivals is None else frozenset(request.rivals)
        prepared.floats.to_beat = request.to_beat.ratios if request.to_beat is not None else {}
        self._open_float_forms(prepared, run.plan)
        quiet.findings[:0] = prepared.findings
        run = stages.within_sizes(run, prepared.original.graph)
        with store.stage(output, replace=False) as folder:
            assignment = self._assignment(run.plan, prepared, quiet)
            assign.decide(assignment)
            small, selected, stuck = stages.search(
                run.plan,
                prepared.original,
                assignment,
                folder,
                quiet,
                prepared.floats,
                timing=self._lock.timing,
            )
            trial = selected.trial
            measured = trial_result.measured(trial)
            if (reason := trial.unfaithful(run.plan)) is not None:
                trial.close()
                measured = msgspec.structs.replace(measured, faithful=False)
                reason = f"not faithful enough: {reason}" + (f"; {stuck}" if stuck else "")
                return Done(
                    outcome="refused",
                    reason=reason,
                    measured=measured,
                    command=_command(run.plan, request.candidate, output.name),
                )
            if request.judge_only:
                trial.close()
                return Done(
                    outcome="skipped", reason="faithful; times are taken elsewhere", measured=measured
                )
            usual = not trial.changed and not run.plan.backend_options
            if usual and prepared.original.graph.program is not None:
                self._keep_float_form(trial, run.plan)
            if request.to_beat is not None and (
                reason := trial_result.lost(trial, measured, request.to_beat)
            ):
                trial.close()
                return Done(
                    outcome="skipped",
                    reason=reason,
                    measured=measured,
                    command=_command(run.plan, request.candidate, output.name),
                )
            if trial.slower:
                run = replace(run, plan=run.plan.with_(allow_slower=True))
            ceiling = roofline.probe(prepared.original.graph, trial.reads, run.plan, shape=trial.shape)
            quiet.found([*ceiling.findings(), *(step.finding() for step in trial.steps)])
            made = publish(
                run,
                prepared.original,
                small,
                selected,
                ceiling,
                folder,
                output,
                quiet,
                measure_memory=self._memory.probe,
            )
        measured = trial_result.published(measured, made.report)
        if self._metric is not None:
            quiet.step("score", self._setup.metric or "")
            try:
                measured = msgspec.structs.replace(measured, score=self._metric.score(output))
            except (SourceError, UsageError) as error:
                if run.plan.quant == "none":
                    raise SourceFailure(error) from error
                command = _command(run.plan, request.candidate, output.name)
                return Done(
                    outcome="refused", reason=trial_result.sentence(error), measured=measured, command=command
                )
        return Done(
            outcome="published",
            reason=trial.verdict,
            measured=measured,
            artifact=str(output),
            command=_command(run.plan, request.candidate, output.name),
        )

    def survey(self, survey: Survey) -> LowerBounds:
        """Return the lower bounds of formats; none where the source can't be opened, which the trials will say."""
        plan = survey.candidate.plan(self._setup.plan)
        with self._lock.working():
            try:
                prepared, run = self._opened(plan, _Steps(self._reporter))
                run = stages.within_sizes(run, prepared.original.graph)
                with self._lock.timing():
                    return lower_bounds(prepared.original, run.plan, survey.formats)
            except (InferError, SourceFailure):
                return LowerBounds()

    def _opened(self, plan: Plan, reporter: Reporter) -> tuple[Prepared, Resolved]:
        """Resolve the plan, and load and capture the source unless an earlier trial did."""
        run = resolve(plan, reporter)
        refuse_backend(run.plan)
        stages.prepare_kernels(run.plan, reporter)
        return self._prepare(run, reporter)

    def _prepare(self, run: Resolved, reporter: Reporter) -> tuple[Prepared, Resolved]:
        """Load and capture the source once for each way that trials need it; only the last one is kept."""
        if self._prepared is not None:
            chosen = resolve_cache(run, self._prepared.original.loaded.task)
            if self._prepared.key == _key(chosen.plan):
                return self._prepared, chosen
            self._prepared = None
        fresh = _Steps(reporter)
        try:
            loaded, chosen = stages.load(run, fresh)
            original = stages.capture_original(chosen.plan, loaded, fresh)
        except UsageError as error:
            raise SourceFailure(error) from error
        except NotUsableError as error:
            raise SourceFailure(error) from error
        key = _key(chosen.plan)
        name = "-".join(map(str, key))
        shutil.rmtree(self._work / f"float-{name}", ignore_errors=True)
        floats = stages.float_forms(original, self._work / f"float-{name}")
        self._prepared = Prepared(key, original, floats, fresh.findings)
        return self._prepared, chosen

    def _keep_float_form(self, trial: Trial, plan: Plan) -> None:
        """Keep what a trial of the unchanged model lowered, as the form that others are timed against."""
        place = self._float_form(trial.backend, plan)
        if not place.exists():
            shutil.copytree(
                trial.folder, place, copy_function=lambda old, new: os.link(os.path.realpath(old), new)
            )

    def _open_float_forms(self, prepared: Prepared, plan: Plan) -> None:
        """Open the float forms worth timing against that earlier trials lowered, in this process or one that died."""
        shape, program = prepared.original.mode.shape, prepared.original.graph.program
        if plan.quant == "none" and plan.dtype == "float32":
            return
        for backend in prepared.floats.rivals or ():
            place = self._float_form(backend, plan)
            own = shape if plugins.get("backends", backend).STEPS else None
            if program is not None and place.exists():
                prepared.floats.adopt(backend, place, own, plan.device)

    def _float_form(self, backend: str, plan: Plan) -> Path:
        return self._work / "float-forms" / f"{backend}-{plan.kv_dtype}"

    def _assignment(self, plan: Plan, prepared: Prepared, reporter: Reporter) -> assign.Assignment:
        """Make the assignment of a trial; calibration statistics and packed weights are those of earlier trials of the
        same kind. Recovery trains packed weights in place: those are its own.
        """
        made = stages.make_assignment(plan, prepared.original, reporter)
        kind = (plan.calibrate, "none" if plan.quant == "none" else "any")
        if kind in prepared.stats:
            made.__dict__["stats"] = prepared.stats[kind]
        elif plan.quant != "none" and made.stats is not None:
            prepared.stats[kind] = made.stats
        if not plan.recover:
            room = int(PACKED_SHARE * hardware.memory_available())
            made.packing_cache = prepared.packings.setdefault(plan.calibrate, compress.PackingCache(room))
        return made


class _Steps(Reporter):
    """Passes steps and progress on, and keeps the findings of its own trial."""

    def __init__(self, parent: Reporter) -> None:
        super().__init__()
        self.step, self.progress = parent.step, parent.progress  # type: ignore[method-assign]


def _key(plan: Plan) -> tuple[object, ...]:
    """Return what decides how a source is loaded and captured: batch norms are folded for formats only."""
    return plan.kv_dtype, "packed" if plan.quant != "none" else "float"


def _command(plan: Plan, candidate: Candidate, name: str) -> str:
    """Return the command that makes a trial, with an output beside that of the search: `model-ort-int8.infer`."""
    label = re.sub(r"[^a-z0-9.]+", "-", candidate.label.lower()).strip("-")
    return formatting.command(plan, f"{Path(name).stem}-{label}.infer")
