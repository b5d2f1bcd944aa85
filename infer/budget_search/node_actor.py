"""Trials on another node of a cluster: a worker process below an actor, in a folder of its own.

Artifacts are deleted on the node: the winner is made on the machine of the search, which it is for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..budgets import Budgets
from ..errors import InferError
from ..plan import Plan
from . import journal
from .trial_process.messages import Done, Failed, Question, Result, Setup, StepStarted
from .trial_process.trial_runner import TrialRunner
from .trial_process.worker_process import TrialLimits, default_limits

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # Ray sets the first one to the actor's CPUs


class Facts(msgspec.Struct, frozen=True):
    """Facts that decide if a node can take part: digests by name, and the machine that times depend on."""

    digests: dict[str, str]
    machine: str

    def differs(self, other: Facts) -> str:
        """Return what another node has not the same, for display; "" for nothing."""
        names = [name for name, value in self.digests.items() if other.digests.get(name) != value]
        return f"not the same there: {', '.join(names)}" if names else ""


def facts_of(plan: Plan, budgets: Budgets) -> Facts:
    """Return the facts of this machine."""
    return Facts(journal.digests(plan, budgets), journal.machine(plan.device))


class NodeTrials:
    """A `TrialRunner` in the process of an actor; `step` is asked from another thread while `run` goes on.

    `limits` of a trial; None: by the node's free memory. `environment`: thread settings of the machine of the search.
    """

    def __init__(self, setup: bytes, limits: TrialLimits | None, environment: Mapping[str, str]) -> None:
        for name in THREADS:
            os.environ.pop(name, None)
        os.environ.update(environment)
        self._folder = Path(tempfile.mkdtemp(prefix="infer-search-"))
        own = msgspec.structs.replace(msgspec.json.decode(setup, type=Setup), work=str(self._folder))
        self._runner = TrialRunner(own, limits or default_limits())
        self._step: bytes | None = None

    def facts(self, plan: Plan, budgets: Budgets) -> Facts:
        """Return what this node has."""
        return facts_of(plan, budgets)

    def run(self, question: bytes, seconds_left: float | None) -> bytes:
        """Run a trial; the answer is a `Result`."""
        asked = msgspec.json.decode(question, type=Question)
        if isinstance(asked, Setup):
            raise TypeError("an actor is set up when it is made")
        self._step = None
        try:
            found: Result = self._runner.run(asked, seconds_left, self._say)
        except InferError as error:
            found = Failed.of(error)
        if isinstance(found, Done) and found.artifact:
            shutil.rmtree(Path(found.artifact).parent, ignore_errors=True)
            found = msgspec.structs.replace(found, artifact="")
        return msgspec.json.encode(found)

    def step(self) -> bytes | None:
        """Return the latest step of the trial that runs, a `StepStarted`."""
        return self._step

    def close(self) -> None:
        """End the worker and delete the folder."""
        self._runner.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _say(self, name: str, detail: str) -> None:
        self._step = msgspec.json.encode(StepStarted(name, detail))
