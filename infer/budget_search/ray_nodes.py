"""Trials on the other nodes of a Ray cluster: an actor on each, which holds the node's CPUs while the search runs.

A node takes part when it is a machine like this one, as times depend on it, and has the same infer, libraries, source
and data at the same paths. A node that is lost costs no trial. Artifacts of other nodes are deleted there: the winner
is made on the machine of the search, which it is for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import structs

from ..budgets import Budgets
from ..distribution import install
from ..errors import InferError, NotUsableError, UsageError
from ..plan import Plan
from ..report.search_record import TrialRecord
from ..reporter import Reporter
from ..spec import Finding
from . import journal
from .trial_process.messages import Setup, TrialRequest
from .trial_process.worker_process import TrialLimits, Worker, default_limits

START_SECONDS = 120.0  # until an actor answers: it waits for CPUs that other work of the cluster holds
CLOSE_SECONDS = 10.0
ATTEMPTS = 3  # on nodes that were lost: then it is the trial that loses them
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # Ray sets the first one to the actor's CPUs


class NodeLostError(Exception):
    """The node does not answer any more; the text says why."""


def no_step(name: str, detail: str) -> None:
    """Ignore a step: those of trials side by side say nothing on one line."""


@dataclass
class RayNode:
    """A node with its actor, a `NodeTrials`; `run` and `close` are those of a `Worker`."""

    name: str
    actor: Any

    def run(
        self, request: TrialRequest, seconds_left: float | None, step: Callable[[str, str], None]
    ) -> TrialRecord:
        """Run a trial on the node; raises `NodeLostError`, and the `InferError` that every trial would meet."""
        import ray
        from ray.exceptions import RayError

        try:
            answer = ray.get(self.actor.run.remote(request, seconds_left))
        except RayError as error:
            raise NodeLostError(_first_line(error)) from error
        if isinstance(answer, InferError):
            raise answer
        return structs.replace(answer, node=self.name)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the node's worker and delete its artifacts, then the actor."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            ray.wait([self.actor.close.remote()], timeout=CLOSE_SECONDS)
        ray.kill(self.actor)


class NodeTrials:
    """A `Worker` in the process of an actor. `limits` of a trial; None: by the node's free memory.

    `environment`: thread settings of the machine of the search.
    """

    def __init__(self, setup: Setup, limits: TrialLimits | None, environment: Mapping[str, str]) -> None:
        for name in THREADS:
            os.environ.pop(name, None)
        os.environ.update(environment)
        self._folder = Path(tempfile.mkdtemp(prefix="infer-search-"))
        self._worker = Worker(structs.replace(setup, work=str(self._folder)), limits or default_limits())

    def facts(self, plan: Plan, budgets: Budgets) -> dict[str, str]:
        """Return what this node has."""
        return facts_of(plan, budgets)

    def run(self, request: TrialRequest, seconds_left: float | None) -> TrialRecord | InferError:
        """Run a trial; an error that ends the search is returned, as Ray would raise it as one of its own."""
        try:
            return self._worker.run(request, seconds_left, no_step)
        except InferError as error:
            return error
        finally:
            shutil.rmtree(self._worker.setup.artifact(request.number).parent, ignore_errors=True)

    def close(self) -> None:
        """End the worker and delete the folder."""
        self._worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def facts_of(plan: Plan, budgets: Budgets) -> dict[str, str]:
    """Return by name what a node has to have like this machine, digested."""
    return {**journal.digests(plan, budgets), "machine": journal.machine(plan.device)}


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return what another node has not the same, for display; "" for nothing."""
    names = [name for name, value in here.items() if there.get(name) != value]
    return f"not the same there: {', '.join(names)}" if names else ""


@contextlib.contextmanager
def joined(
    plan: Plan, budgets: Budgets, setup: Setup, limits: TrialLimits | None, reporter: Reporter
) -> Iterator[list[RayNode]]:
    """Connect to the cluster and yield its other nodes that can take part; findings tell which can't, and why.

    An actor holds all CPUs and GPUs of a node, this one's too, so that Ray runs nothing beside what is timed there.
    `limits` of a trial; None: of each node's own memory. Raises `NotUsableError` without ray and without a cluster.
    """
    connect(budgets.ray_address or "auto")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        reporter.step("nodes", f"starting a worker on each of the {len(alive)} nodes of the cluster")
        environment = {name: os.environ[name] for name in THREADS if name in os.environ}
        actors = {
            place: ray.remote(NodeTrials)
            .options(
                num_cpus=node["Resources"].get("CPU", 0),
                num_gpus=node["Resources"].get("GPU", 0),
                max_concurrency=2,  # a trial, and its end
                scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False),
            )
            .remote(setup, limits, environment)
            for place, node in alive.items()
        }
        answers = {place: actor.facts.remote(plan, budgets) for place, actor in actors.items()}
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=START_SECONDS)
        own, here = ray.get_runtime_context().get_node_id(), facts_of(plan, budgets)
        nodes = []
        for place, node in alive.items():
            name = f"{node.get('NodeManagerHostname') or node['NodeManagerAddress']} ({place[:8]})"
            why = _why_not(answers[place], here)
            if place == own:  # its CPUs stay held
                said = f"here, and other work of the cluster may disturb its times: {why}" if why else "here"
            elif why:
                said = f"left out: {why}"
                ray.kill(actors[place])
            else:
                said = "runs trials"
                nodes.append(RayNode(name, actors[place]))
            reporter.found([Finding("search", f"node {name}", None, why=said)])
        yield nodes
    finally:
        ray.shutdown()


def connect(address: str) -> None:
    """Join the cluster as a driver on one of its nodes."""
    if address.startswith("ray://"):
        raise UsageError(
            "a search with --ray must run on a node of the cluster: its times are those of this machine",
            where="--ray-address",
            hint="Start it on that node, with --ray-address auto",
        )
    if find_spec("ray") is None:
        raise NotUsableError("a search on a cluster needs ray", hint=install("ray"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage data is sent
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise NotUsableError(
            f"no Ray cluster at {address}: {_first_line(error)}",
            hint="Start one with 'ray start --head', or leave out --ray",
        ) from error


def _why_not(answer: Any, here: Mapping[str, str]) -> str:
    """Return why a node can't take part, by its answer to `facts`; "" where it can."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return difference(here, ray.get(answer, timeout=0))
    except GetTimeoutError:
        return f"its CPUs were not free, or it did not start, within {START_SECONDS:.0f} s"
    except RayError as error:
        return _first_line(error)


def _first_line(error: Exception) -> str:
    """Return the line of Ray's error that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
