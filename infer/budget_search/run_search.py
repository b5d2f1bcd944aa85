"""search(): from a source and budgets to the artifact that meets them best.

    float on every backend ─▶ each format in plain torch ─▶ formats on the other backends ─▶ variants of the best

Before each trial the ones before it say if it can still win; what the journal knows is not run again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from .. import device as hardware
from .. import paths
from ..artifact import store
from ..budgets import Budgets
from ..errors import UsageError
from ..options import checked
from ..plan import Plan
from ..report import document
from ..report.search_record import Candidate, Measured, SearchRecord, TrialRecord
from ..reporter import Reporter
from ..run import stages
from ..run.publish import Outcome
from ..run.resolve_plan import check_plan
from . import ray_nodes, space
from .final_artifact import publish_best
from .progress import StateFile
from .trial_loop import Search
from .trial_process.worker_process import TrialLimits, default_limits


@dataclass(frozen=True)
class SearchTrial:
    """One trial of a search: its record, and the plan that makes it."""

    record: TrialRecord
    plan: Plan

    @property
    def candidate(self) -> Candidate:
        """The backend, format and dtype that were tried."""
        return self.record.candidate

    @property
    def measured(self) -> Measured | None:
        """Times, memory, size and fidelity; None where nothing could be measured."""
        return self.record.measured

    def publish(self, output: Path, *, reporter: Reporter | None = None, replace: bool = False) -> Outcome:
        """Make the artifact of this trial; raises as `optimize`, and `UsageError` for a trial without a result."""
        if self.record.outcome != "published":
            raise UsageError(
                f"{self.candidate.label} has no result to publish: {self.record.outcome}, {self.record.reason}"
            )
        slower = self.measured is not None and self.measured.slower
        plan = self.plan.with_(allow_slower=self.plan.allow_slower or slower)
        return stages.optimize(plan, output, reporter=reporter, replace=replace)


@dataclass(frozen=True)
class SearchResult:
    """The published winner at `path` with its report, and the record of the search."""

    path: Path
    report: document.Report
    record: SearchRecord
    plan: Plan  # as asked

    @property
    def trials(self) -> tuple[SearchTrial, ...]:
        """All trials, in the order in which they ended."""
        plan = _trial_plan(self.plan, self.record.budgets)
        return tuple(SearchTrial(r, r.candidate.plan(plan)) for r in self.record.trials)

    @property
    def best(self) -> SearchTrial:
        """The trial that was published."""
        return next(trial for trial in self.trials if trial.record.chosen)

    @property
    def front(self) -> tuple[SearchTrial, ...]:
        """The trials that no other one beats in latency, memory, size and error together."""
        return tuple(trial for trial in self.trials if trial.record.on_front)


def search(
    plan: Plan,
    budgets: Budgets,
    output: Path,
    *,
    reporter: Reporter | None = None,
    replace: bool = False,
    limits: TrialLimits | None = None,
) -> SearchResult:
    """Search for the artifact that meets `budgets` and is best for their objective, and publish it as `output`.

    Fields of `plan` that are not "auto" or "none" are the same in every trial; `plan.max_drop` and `plan.max_error` are
    budgets. Each trial is an `optimize` in a process of its own, within `limits`. Nothing is published when this
    raises:

    - `UsageError`, `SourceError`, `UnsafeSourceError`, `BusyError`: as `optimize`.
    - `GateError`: no trial meets the budgets; it names the three nearest and what each budget would have to be.
    - `KeyboardInterrupt`: interrupted, unless `budgets.keep_best` is set and a trial meets the budgets.
    """
    plan, budgets = check_plan(plan), check_budgets(budgets, plan)
    paths.require_writable()
    reporter = reporter or Reporter()
    base = _trial_plan(plan, budgets)
    if space.formats(plan, budgets) != ["none"]:  # once, outside the time of a trial
        device = hardware.resolve(plan.device).value
        stages.prepare_kernels(plan.with_(device=device, quant="int8"), reporter)
    with store.stage(output, replace=replace) as folder, StateFile() as file:
        work = folder / "search"
        work.mkdir()
        run = Search(base, budgets, output, work, reporter, limits or default_limits())
        run.announce = file.write
        with contextlib.ExitStack() as cluster:
            if budgets.ray:
                joined = ray_nodes.joined(base, budgets, run.worker.setup, limits, reporter)
                run.spread(cluster.enter_context(joined))
            interrupted = run.all_trials()
        best = run.best_with_artifact(interrupted=bool(interrupted))
        record = run.record(best, interrupted)
        made = publish_best(run.artifacts[best.candidate], record, folder, output)
    return SearchResult(made.path, made.report, record, plan)


def _trial_plan(plan: Plan, budgets: Budgets) -> Plan:
    """Return the plan that all trials start from: one slower than float is kept where memory or size is the aim."""
    return plan.with_(allow_slower=plan.allow_slower or budgets.aim in ("memory", "size"))


def check_budgets(budgets: Budgets, plan: Plan) -> Budgets:
    """Return the budgets with canonical values; raise `UsageError` for those that exclude each other."""
    budgets = checked(budgets)
    if budgets.min_score is not None and budgets.metric is None:
        raise UsageError(
            "--min-score limits the value of --metric", hint="Give --metric FILE.py:FUNCTION as well"
        )
    space.check_options(budgets)
    if budgets.ray_address is not None and not budgets.ray:
        raise UsageError("--ray-address names a cluster for --ray", hint="Give --ray as well")
    timed = budgets.max_latency or budgets.max_p99 or budgets.max_first_token or budgets.min_throughput
    if not plan.batches and (timed or budgets.aim in ("latency", "throughput")):
        raise UsageError(
            "a search for speed times its trials, and --batch names no size", hint="Give --batch 1,8"
        )
    if budgets.metric is not None:
        from .trial_process.user_metric import load

        load(budgets.metric)
    return budgets
