"""Nodes of a Ray cluster as places of trials: one actor on each, which holds the node's CPUs while the search runs.

A node takes part when it has the same infer, libraries, source and data as this machine, at the same paths.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import msgspec

from ..budgets import Budgets
from ..errors import NotUsableError, UsageError
from ..plan import Plan
from ..reporter import Reporter
from ..spec import Finding
from .node_actor import THREADS, Facts, NodeTrials, facts_of
from .parallel_trials import NodeLostError
from .trial_process.messages import (
    Done,
    Failed,
    LowerBounds,
    Result,
    Setup,
    StepStarted,
    Survey,
    TrialRequest,
)
from .trial_process.worker_process import TrialLimits

START_SECONDS = 120.0  # until an actor answers: it waits for CPUs that other work of the cluster holds
CLOSE_SECONDS = 10.0
LOOK = 0.5  # seconds between two looks at the step of a trial


@dataclass
class RayNode:
    """A node with its actor; see `parallel_trials.Node`."""

    name: str
    times: bool
    actor: Any

    def run(
        self, question: TrialRequest | Survey, seconds_left: float | None, step: Callable[[str, str], None]
    ) -> Done | LowerBounds:
        """Run a trial on the node."""
        import ray
        from ray.exceptions import RayError

        try:
            running = self.actor.run.remote(msgspec.json.encode(question), seconds_left)
            said = None
            while not ray.wait([running], timeout=LOOK)[0]:
                if (now := ray.get(self.actor.step.remote())) != said and now is not None:
                    said = now
                    found = msgspec.json.decode(now, type=StepStarted)
                    step(found.name, found.detail)
            answer: Any = msgspec.json.decode(ray.get(running), type=Result)
        except RayError as error:
            raise NodeLostError(_first_line(error)) from error
        if isinstance(answer, Failed):
            raise answer.error()
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the node's worker and delete its artifacts, then the actor."""
        import ray
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            ray.wait([self.actor.close.remote()], timeout=CLOSE_SECONDS)
        ray.kill(self.actor)


@contextlib.contextmanager
def joined(
    plan: Plan, budgets: Budgets, setup: Setup, limits: TrialLimits | None, reporter: Reporter
) -> Iterator[list[RayNode]]:
    """Connect to the cluster and yield its other nodes that can take part; findings tell which can't, and why.

    `limits` of a trial; None: of each node's own memory. Raises `NotUsableError` without ray and without a cluster.
    """
    connect(budgets.ray_address or "auto")
    import ray

    try:
        own = ray.get_runtime_context().get_node_id()
        alive = [found for found in ray.nodes() if found["Alive"]]
        reporter.step("nodes", f"starting a worker on each of the {len(alive)} nodes of the cluster")
        actors = {found["NodeID"]: _actor(found, setup, limits) for found in alive}
        answers = {place: actor.facts.remote(plan, budgets) for place, actor in actors.items()}
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=START_SECONDS)
        nodes, here = [], facts_of(plan, budgets)
        for found in alive:
            place = found["NodeID"]
            name = f"{found.get('NodeManagerHostname') or found['NodeManagerAddress']} ({place[:8]})"
            facts = _answer(answers[place])
            node = _judged(name, facts, here, actors[place], reporter, own=place == own)
            nodes += [] if node is None else [node]
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
        raise NotUsableError("a search on a cluster needs ray", hint="pip install 'infer[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage data is sent
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise NotUsableError(
            f"no Ray cluster at {address}: {_first_line(error)}",
            hint="Start one with 'ray start --head', or leave out --ray",
        ) from error


def _actor(found: dict[str, Any], setup: Setup, limits: TrialLimits | None) -> Any:
    """Start an actor that holds all CPUs and GPUs of a node, so that Ray runs nothing beside what is timed there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    held = found["Resources"]
    environment = {name: os.environ[name] for name in THREADS if name in os.environ}
    made = ray.remote(NodeTrials).options(
        num_cpus=held.get("CPU", 0),
        num_gpus=held.get("GPU", 0),
        max_concurrency=3,  # a trial, its step, and the end of both
        scheduling_strategy=NodeAffinitySchedulingStrategy(found["NodeID"], soft=False),
    )
    return made.remote(msgspec.json.encode(setup), limits, environment)


def _answer(reference: Any) -> Facts | str:
    """Return the facts of a node, or the reason why it did not answer."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(reference, timeout=0)  # type: ignore[no-any-return]
    except GetTimeoutError:
        return f"its CPUs were not free, or it did not start, within {START_SECONDS:.0f} s"
    except RayError as error:
        return _first_line(error)


def _judged(
    name: str, facts: Facts | str, here: Facts, actor: Any, reporter: Reporter, *, own: bool
) -> RayNode | None:
    """Return the node unless it is this one, whose CPUs stay held, or can't take part; report which."""
    why = facts if isinstance(facts, str) else "" if own else here.differs(facts)
    node = None
    if own:
        said = f"here, and other work of the cluster may disturb its times: {why}" if why else "here"
    elif why or isinstance(facts, str):
        import ray

        said = f"left out: {why}"
        ray.kill(actor)
    else:
        times = facts.machine == here.machine
        said = "runs whole trials" if times else "another kind of machine: judges fidelity alone"
        node = RayNode(name, times, actor)
    reporter.found([Finding("search", f"node {name}", None, why=said)])
    return node


def _first_line(error: Exception) -> str:
    """Return the line of Ray's error that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
