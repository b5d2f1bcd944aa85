"""Trials of a stage on several nodes at once, one at a time on each; a node that is lost costs no trial.

Nodes of the kind of this machine run whole trials. The times of others say nothing here: they judge the fidelity of
trials that wait, and what is not faithful there is not run again.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..report.search_record import Candidate, TrialRecord
from ..reporter import Reporter
from ..spec import Finding
from .trial_process.messages import Done, LowerBounds, Survey, TrialRequest

ATTEMPTS = 3  # on nodes that were lost: then it is the trial that loses them


class NodeLostError(Exception):
    """The node does not answer any more; the text says why."""


class Node(Protocol):
    """One machine: `name`, "" for the one of the search, and whether its times count (`times`)."""

    name: str
    times: bool

    def run(
        self, question: TrialRequest | Survey, seconds_left: float | None, step: Callable[[str, str], None]
    ) -> Done | LowerBounds:
        """Answer a question; raises `NodeLostError`, and the `InferError` that every trial would meet."""

    def close(self) -> None:
        """End what the node runs for this search."""


class StageCallbacks(Protocol):
    """Functions of a search that a stage calls, on the thread that runs the stage only."""

    reporter: Reporter

    def survey(self, candidate: Candidate) -> None: ...
    def without_running(self, candidate: Candidate) -> TrialRecord | None: ...
    def request(self, candidate: Candidate, *, judge_only: bool = False) -> TrialRequest: ...
    def seconds_left(self) -> float | None: ...
    def ended(self, candidate: Candidate, done: Done, began: float, node: str) -> TrialRecord: ...
    def add(self, record: TrialRecord) -> None: ...
    def step(self, candidate: Candidate, name: str, detail: str) -> None: ...
    def clock(self) -> float: ...


@dataclass(frozen=True)
class _Task:
    candidate: Candidate
    node: Node
    began: float
    judge_only: bool


@dataclass(frozen=True)
class _Step:
    task: _Task
    name: str
    detail: str


@dataclass(frozen=True)
class _End:
    task: _Task
    result: Done | LowerBounds | Exception


@dataclass
class ParallelTrials:
    """The nodes of a search and what runs on them. The first node is this machine, which is never lost."""

    trials: StageCallbacks
    nodes: list[Node]
    lost: Counter[Candidate] = field(default_factory=Counter)
    judged: set[Candidate] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._events: queue.Queue[_Step | _End] = queue.Queue()
        self._running: dict[int, _Task] = {}  # by the node's place in `nodes`

    def stage(self, candidates: Sequence[Candidate]) -> None:
        """Run candidates until each has a record; an error that ends the search is raised at once."""
        waiting = deque(candidates)
        if waiting:
            self.trials.survey(waiting[0])
        while waiting or any(not task.judge_only for task in self._running.values()):
            self._start_trials(waiting)
            self._start_judging(waiting)
            if self._running:
                self._handle(self._events.get(), waiting)

    def close(self) -> None:
        """End what all nodes run."""
        for node in self.nodes:
            node.close()

    def _idle(self, *, times: bool) -> list[Node]:
        busy = {id(task.node) for task in self._running.values()}
        return [node for node in self.nodes if node.times is times and id(node) not in busy]

    def _start_trials(self, waiting: deque[Candidate]) -> None:
        for node in self._idle(times=True):
            while waiting:
                candidate = waiting.popleft()
                if (record := self.trials.without_running(candidate)) is None:
                    self._start(candidate, node)
                    break
                self.trials.add(record)

    def _start_judging(self, waiting: deque[Candidate]) -> None:
        """Let nodes of other kinds judge what waits longest: the end of the queue."""
        for node in self._idle(times=False):
            fresh = (one for one in reversed(waiting) if one not in self.judged)
            candidate = next((one for one in fresh if self.trials.without_running(one) is None), None)
            if candidate is not None:
                self.judged.add(candidate)
                self._start(candidate, node, judge_only=True)

    def _start(self, candidate: Candidate, node: Node, *, judge_only: bool = False) -> None:
        task = _Task(candidate, node, self.trials.clock(), judge_only)
        question = self.trials.request(candidate, judge_only=judge_only)
        left = self.trials.seconds_left()
        self._running[id(node)] = task
        where = f"on {node.name}" if node.name else ""
        self.trials.step(candidate, "judge" if judge_only else "trial", where)
        threading.Thread(target=self._ask, args=(task, question, left), daemon=True).start()

    def _ask(self, task: _Task, question: TrialRequest, left: float | None) -> None:
        """Wait for a node, in a thread of its own."""

        def step(name: str, detail: str) -> None:
            self._events.put(_Step(task, name, detail))

        try:
            self._events.put(_End(task, task.node.run(question, left, step)))
        except Exception as error:  # noqa: BLE001 - raised by the thread that runs the stage
            self._events.put(_End(task, error))

    def _handle(self, event: _Step | _End, waiting: deque[Candidate]) -> None:
        task = event.task
        if isinstance(event, _Step):
            self.trials.step(task.candidate, event.name, event.detail)
            return
        self._running.pop(id(task.node), None)
        result = event.result
        if isinstance(result, NodeLostError):
            self._drop(task, str(result), waiting)
        elif isinstance(result, Exception):
            if not task.judge_only:
                raise result
        elif isinstance(result, LowerBounds):
            raise TypeError("a trial was answered with bounds")
        elif not task.judge_only:
            self.trials.add(self.trials.ended(task.candidate, result, task.began, task.node.name))
        elif task.candidate in waiting and result.measured is not None and not result.measured.faithful:
            waiting.remove(task.candidate)
            self.trials.add(self.trials.ended(task.candidate, result, task.began, task.node.name))

    def _drop(self, task: _Task, why: str, waiting: deque[Candidate]) -> None:
        """Go on without a node; its trial runs elsewhere, or is an outcome after `ATTEMPTS`."""
        self.nodes = [node for node in self.nodes if node is not task.node]
        label = task.candidate.label
        then = "its trial runs elsewhere" if not task.judge_only else "no trial is missing"
        if not task.judge_only:
            self.lost[task.candidate] += 1
            if self.lost[task.candidate] < ATTEMPTS:
                waiting.appendleft(task.candidate)
            else:
                reason = f"{ATTEMPTS} nodes were lost while they ran it, the last one: {why}"
                crashed = Done(outcome="crashed", reason=reason)
                self.trials.add(self.trials.ended(task.candidate, crashed, task.began, task.node.name))
                then = "its trial lost others before and is not run again"
        said = f"lost while it ran {label}, {then}: {why}"
        self.trials.reporter.found([Finding("search", f"node {task.node.name}", None, why=said)])
