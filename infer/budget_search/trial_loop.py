"""The trials of a search: run in isolated workers, skipped by bounds, known from the journal."""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import structs

from ..budgets import Budgets
from ..plan import Plan
from ..report.search_record import Candidate, SearchRecord, TrialRecord
from ..reporter import Reporter
from ..spec import Finding
from . import bounds, feasibility, finalists, journal, space
from .feasibility import trial_finding
from .final_artifact import may_win, search_record
from .known_trials import KnownTrials
from .progress import SearchReporter, State, current_state, progress_text
from .ray_nodes import ATTEMPTS, NodeLostError, RayNode, no_step
from .trial_process.messages import Setup, TrialRequest
from .trial_process.worker_process import SHORTEST, Start, TrialLimits, Worker, WorkerProcess


@dataclass
class Search:
    """State of one search: what is known, what runs trials, and artifacts of the trials that were published here.

    Trials run one after the other on this machine, or side by side on `nodes`: this machine and others of a cluster.
    """

    plan: Plan
    budgets: Budgets
    output: Path
    work: Path
    reporter: Reporter
    limits: TrialLimits
    start: Start = WorkerProcess
    clock: Callable[[], float] = time.monotonic
    announce: Callable[[State], None] = lambda state: None  # to other processes
    artifacts: dict[Candidate, Path] = field(default_factory=dict)
    nodes: list[Worker | RayNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        work = str(self.work.absolute())
        keeps = feasibility.keeps_slower(self.budgets, self.plan)
        metric, name = self.budgets.metric, self.output.name
        setup = Setup(plan=self.plan, name=name, work=work, metric=metric, keeps_slower=keeps)
        self.worker = Worker(setup, self.limits, self.start)
        self.num_requests = 0
        self.began = self.clock()
        self.journal = journal.Journal(self.plan, self.budgets)
        if self.budgets.fresh:
            journal.forget(self.plan.source)
        first = space.backends(self.plan, self.budgets)[0]
        limits = feasibility.limits_of(self.budgets, self.plan)
        self.known = KnownTrials(self.plan, self.budgets, first, limits)

    def spread(self, nodes: Sequence[RayNode]) -> None:
        """Run the trials on these nodes too."""
        self.nodes = [self.worker, *nodes]

    def all_trials(self) -> str:
        """Run the stages and end the workers; return what interrupted the search, "" for nothing."""
        try:
            for number, stage in enumerate(space.first_candidates(self.plan, self.budgets)):
                self.stage(stage)
                if number == 0:
                    self.known.use_float_score()
            self.refine()
            before = self.known.best
            self.last_round()
            best = self.known.best
            if before and best and before.candidate != best.candidate and self.refine():
                self.last_round()  # with variants of the one that has turned out to be the best
        except KeyboardInterrupt:
            if not self.budgets.keep_best:
                raise
            return "Ctrl-C"
        finally:
            self.close()
        return ""

    def refine(self) -> bool:
        """Try variants of the best trial, and those of the best one of them; return whether there were any."""
        count = len(self.known.records)
        for _ in range(2):
            if (best := self.known.best) is not None:
                given = best.candidate, self.plan, self.budgets
                self.stage(space.refinements(*given, generates=self.known.generates))
        return len(self.known.records) > count

    def stage(self, candidates: Sequence[Candidate]) -> None:
        """Run the candidates that have no record, those that promise most first: what they reach skips others."""
        fresh = [one for one in dict.fromkeys(candidates) if one not in self.known.records]
        fresh.sort(key=self.known.expected_cost)
        if self.nodes:
            self.stage_on_nodes(fresh)
            return
        for candidate in fresh:
            if candidate not in self.known.records:
                self.add(self.without_running(candidate) or self.run(candidate))
                self.stage(self.known.followers(candidate))

    def stage_on_nodes(self, candidates: Sequence[Candidate]) -> None:
        """Run candidates on `nodes` until each has a record; an error that ends the search is raised."""
        waiting = deque(candidates)
        if waiting:
            self.survey(waiting[0])
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            try:
                self._run_all(waiting, pool)
            except BaseException:
                self.close()  # the threads wait for trials, which end by it
                raise

    def _run_all(self, waiting: deque[Candidate], pool: ThreadPoolExecutor) -> None:
        """Run what waits, one trial at a time on each node; a node that is lost leaves `nodes`."""
        lost = Counter[Candidate]()
        running: dict[Future[TrialRecord], tuple[Worker | RayNode, TrialRequest]] = {}
        while waiting or running:
            busy = [id(node) for node, _ in running.values()]
            for node in [one for one in self.nodes if id(one) not in busy]:
                if (candidate := self._next_to_run(waiting)) is not None:
                    self.step(candidate, "trial", f"on {node.name}" if node.name else "")
                    request = self.request(candidate)
                    running[pool.submit(node.run, request, self.seconds_left(), no_step)] = node, request
            for ended in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                node, request = running.pop(ended)
                try:
                    self.add(self.ended(request, ended.result()))
                except NodeLostError as error:
                    self.nodes.remove(node)
                    candidate = request.candidate
                    lost[candidate] += 1
                    again = lost[candidate] < ATTEMPTS
                    then = "its trial runs elsewhere" if again else "its trial lost others before"
                    said = f"lost while it ran {candidate.label}, {then}: {error}"
                    self.reporter.found([Finding("search", f"node {node.name}", None, why=said)])
                    if again:
                        waiting.appendleft(candidate)
                        continue
                    reason = f"{ATTEMPTS} nodes were lost while they ran it, the last one: {error}"
                    self.add(
                        TrialRecord(candidate=candidate, outcome="crashed", reason=reason, node=node.name)
                    )

    def _next_to_run(self, waiting: deque[Candidate]) -> Candidate | None:
        """Take the first candidate that has to run; those before it are recorded."""
        while waiting:
            candidate = waiting.popleft()
            if (record := self.without_running(candidate)) is None:
                return candidate
            self.add(record)
        return None

    def without_running(self, candidate: Candidate) -> TrialRecord | None:
        """Return the record of a candidate known from the journal or skipped by a bound; None for one to run."""
        known = self.journal.find(candidate)
        if known is not None and bounds.still_holds(self.known, known):
            return known
        self.survey(candidate)
        left = self.seconds_left()
        if why := bounds.why_skip(self.known, candidate) or self.known.out_of_time(candidate, left):
            return TrialRecord(candidate=candidate, outcome="skipped", reason=why)
        return None

    def survey(self, candidate: Candidate) -> None:
        """Request the bounds that need no trial, once; none from a worker that fails, as its trials will report."""
        if self.known.bounds is not None or self.known.out_of_time(candidate, self.seconds_left()):
            return
        self.reporter.step("bounds", "sizes of the packed weights, roofline of this machine")
        formats, step = space.formats(self.plan, self.budgets), partial(self.step, candidate)
        self.known.bounds = self.worker.survey(candidate, formats, self.seconds_left(), step)

    def seconds_left(self) -> float | None:
        if self.budgets.time is None:
            return None
        return self.budgets.time - (self.clock() - self.began)

    def run(self, candidate: Candidate) -> TrialRecord:
        """Run a trial on this machine."""
        text = progress_text(self.known, self.seconds_left())
        self.reporter.step(f"trial {len(self.known.records) + 1}", candidate.label + text)
        request, step = self.request(candidate), partial(self.step, candidate)
        return self.ended(request, self.worker.run(request, self.seconds_left(), step))

    def request(self, candidate: Candidate) -> TrialRequest:
        """Build the request of a trial from the trials known now."""
        self.num_requests += 1
        return TrialRequest(
            number=self.num_requests - 1,
            candidate=candidate,
            rivals=self.known.rivals(),
            to_beat=bounds.to_beat(self.known, candidate),
        )

    def ended(self, request: TrialRequest, record: TrialRecord) -> TrialRecord:
        """Return the record of a trial that ended; the artifact of one that ran here is kept."""
        artifact = self.worker.setup.artifact(request.number)
        if record.outcome == "published" and artifact.exists():
            self.artifacts[record.candidate] = artifact
        return record

    def step(self, candidate: Candidate, name: str, detail: str) -> None:
        """Report a step of the running trial."""
        detail = candidate.label if name == "publish" else detail  # not a path that is gone at the end
        self.show(candidate, f"{name} {detail}")
        if not isinstance(self.reporter, SearchReporter):
            self.reporter.step(name, detail)

    def add(self, record: TrialRecord) -> None:
        self.known.add(record)
        self.journal.add(record)
        self.reporter.found([trial_finding(record, self.known.limits)])
        for candidate in self.artifacts.keys() - may_win(self.known):  # the disk holds the front and no more
            shutil.rmtree(self.artifacts.pop(candidate).parent, ignore_errors=True)
        self.show(None)

    def show(self, running: Candidate | None, step: str = "") -> None:
        """Publish the state of the search to other processes and to the reporter."""
        label = "" if running is None else running.label
        now = current_state(self.known, label, step, str(self.output))
        now = structs.replace(now, elapsed=self.clock() - self.began, left=self.seconds_left())
        self.announce(now)
        if isinstance(self.reporter, SearchReporter):
            self.reporter.state(now)

    def last_round(self) -> None:
        """Time the trials nearest to the best one in turns with it, while time is left."""
        if (left := self.seconds_left()) is not None and left < SHORTEST:
            return
        for record in finalists.nearest(self.known):
            self.has_artifact(record)
        rounds = partial(self.worker.rounds, seconds_left=left, step=self.reporter.step)
        for record in finalists.compare(self.known, self.artifacts, rounds, self.reporter):
            self.known.records[record.candidate] = record
            self.journal.add(structs.replace(record, from_journal=False))

    def has_artifact(self, record: TrialRecord) -> bool:
        """Return whether the artifact of a trial is here, after a look for one that an earlier search kept."""
        missing = record.candidate not in self.artifacts and record.from_journal
        if missing and (path := self.journal.restore(record.candidate, self.work)) is not None:
            self.artifacts[record.candidate] = path
        return record.candidate in self.artifacts

    def best_with_artifact(self, *, interrupted: bool = False) -> TrialRecord:
        """Return the winner; one known from the journal is made once more, and judged by what it measures now."""
        try:
            while (best := self.known.best) is not None:
                if self.has_artifact(best):
                    return best
                self.reporter.step("publish", f"{best.candidate.label} is known, its artifact is made again")
                self.known.records.pop(best.candidate)
                self.add(self.run(best.candidate))
        finally:
            self.close()
        if interrupted:
            raise KeyboardInterrupt
        records, smallest = self.known.records.values(), partial(bounds.least_bytes, self.known)
        ordered = sorted(records, key=lambda record: smallest(record.candidate))
        raise feasibility.nothing_fits(ordered, self.known.limits)

    def record(self, best: TrialRecord, interrupted: str) -> SearchRecord:
        took = self.clock() - self.began
        return search_record(self.known, best.candidate, self.output.name, took=took, interrupted=interrupted)

    def close(self) -> None:
        """End the worker processes of this machine and of other nodes; keep the best artifacts for the search again."""
        for node in self.nodes or [self.worker]:
            node.close()
        self.nodes = []
        near = finalists.nearest(self.known) or ([best] if (best := self.known.best) else [])
        artifacts = ((r.candidate, self.artifacts.get(r.candidate)) for r in near)
        self.journal.keep([(candidate, path) for candidate, path in artifacts if path is not None])
