"""Trials run one after the other on one machine: a worker process, and a new one where the last one can't go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from .messages import Done, Failed, Inquiry, LowerBounds, Rounds, RoundTimes, Setup, Survey, TrialRequest
from .worker_process import TrialLimits, WorkerProcess

SHORTEST = 1.0  # seconds: with less time left no trial is begun

Start = Callable[[Setup, Path], WorkerProcess]
OnStep = Callable[[str, str], None]


@dataclass
class TrialRunner:
    """Asks a worker process, started when it is needed. `setup.work` is the folder of its artifacts and logs."""

    setup: Setup
    limits: TrialLimits
    start: Start = WorkerProcess
    worker: WorkerProcess | None = None
    started: int = 0
    name: str = ""  # of the node, "" for the machine of the search
    times: bool = True  # its times are those of the machine that the search is for

    def run(
        self, question: TrialRequest | Survey, seconds_left: float | None, step: OnStep
    ) -> Done | LowerBounds:
        """Answer a question within the limits and the time left; None: no limit.

        A trial that kills a process that ran others before runs once more in a new one, alone. Raises the `InferError`
        that every trial would meet.
        """
        used = self.worker is not None and self.worker.alive and self.worker.trials > 0
        answer = self._ask(question, seconds_left, step)
        if used and isinstance(answer, Done) and answer.outcome in ("crashed", "out of memory", "failed"):
            self.close()
            answer = self._ask(question, seconds_left, step)
        if isinstance(answer, RoundTimes):
            raise TypeError("a trial was answered with times of rounds")
        return answer

    def rounds(self, question: Rounds, seconds_left: float | None, step: OnStep) -> RoundTimes | Done:
        """Time artifacts in turns; where that fails the outcome says why, and the worker is gone."""
        answer = self._ask(question, seconds_left, step)
        if isinstance(answer, LowerBounds):
            raise TypeError("rounds were answered with bounds")
        return answer

    def close(self) -> None:
        """End the worker process and everything that it started."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _ask(
        self, question: Inquiry, seconds_left: float | None, step: OnStep
    ) -> Done | LowerBounds | RoundTimes:
        threads = question.candidate.threads or self.setup.plan.threads
        if self.worker is not None and (not self.worker.alive or self.worker.setup.plan.threads != threads):
            self.close()
        if self.worker is None:
            setup = msgspec.structs.replace(self.setup, plan=self.setup.plan.with_(threads=threads))
            self.worker = self.start(setup, Path(setup.work) / f"worker-{self.started}.log")
            self.started += 1
        whole = math.inf if seconds_left is None else max(SHORTEST, seconds_left)
        answer = self.worker.run(question, replace(self.limits, search_seconds=whole), step)
        if isinstance(answer, Failed):
            raise answer.error()
        return answer
