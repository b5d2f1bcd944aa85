"""Trials on several nodes: one at a time on each, a lost node costs none, an error of the source ends all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.budget_search import trial_loop
from infer.budget_search.ray_nodes import ATTEMPTS, NodeLostError
from infer.budget_search.trial_process.messages import TrialRequest
from infer.budgets import Budgets
from infer.errors import SourceError
from infer.plan import Plan
from infer.report.search_record import Candidate, Measured, TrialRecord
from infer.reporter import Reporter
from infer.spec import Finding
from tests.budget_search.test_search import scripted

SPACE = {"backend": ("eager", "ort"), "quant": ("none", "int8", "nf4")}


class PlantedNode:
    """A node that answers after the other nodes began, from a table; an exception is raised."""

    def __init__(self, name: str, answers: dict[str, Any], *, meet: Any = None) -> None:
        self.name, self.answers, self.meet = name, answers, meet
        self.asked: list[TrialRequest] = []
        self.at_once, self.most = 0, 0

    def run(
        self, request: TrialRequest, seconds_left: float | None, step: Callable[[str, str], None]
    ) -> TrialRecord:
        self.asked.append(request)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        step("lower", request.candidate.label)
        if self.meet is not None:
            self.meet.wait(60)
        self.at_once -= 1
        answer = self.answers.get(request.candidate.label, 0.01)
        if isinstance(answer, Exception):
            raise answer
        return TrialRecord(
            candidate=request.candidate,
            outcome="published",
            measured=Measured(seconds={1: answer}, size=1000),
            node=self.name,
        )

    def close(self) -> None:
        self.answers = {}

    @property
    def labels(self) -> list[str]:
        return [one.candidate.label for one in self.asked]


class Findings(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def found(self, findings: Any) -> None:
        self.said += [f"{f.what}: {f.why}" for f in findings if isinstance(f, Finding)]


def search_on(plan: Plan, folder: Path, *nodes: PlantedNode, here: Any = None) -> trial_loop.Search:
    made = scripted(plan, folder, here or {}, space=SPACE)
    made.reporter = Findings()
    made.spread(nodes)  # type: ignore[arg-type]
    return made


def reported_text(search: trial_loop.Search) -> str:
    assert isinstance(search.reporter, Findings)
    return "\n".join(search.reporter.said)


def test_each_node_runs_one_trial_at_a_time(plan: Plan, tmp_path: Path) -> None:
    nodes = [PlantedNode("a", {}), PlantedNode("b", {})]
    search = search_on(plan, tmp_path, *nodes)
    search.nodes = list(nodes)  # type: ignore[arg-type] # not here as well
    search.all_trials()
    assert [node.most for node in nodes] <= [1, 1]
    ran = [label for node in nodes for label in node.labels]
    known = {one.label for one, record in search.known.records.items() if record.outcome == "published"}
    assert sorted(ran) == sorted(known), "each once"


def test_trials_run_side_by_side(plan: Plan, tmp_path: Path) -> None:
    meet = threading.Barrier(2)
    nodes = [PlantedNode(name, {}, meet=meet) for name in "ab"]
    search = search_on(plan, tmp_path, *nodes, here={"eager float": "crashed"})
    search.nodes = list(nodes)  # type: ignore[arg-type]
    search.stage([Candidate(backend="eager"), Candidate(backend="ort")])  # neither ends before both began
    assert sorted(label for node in nodes for label in node.labels) == ["eager float", "ort float"]


def test_the_trial_of_a_lost_node_runs_elsewhere(plan: Plan, tmp_path: Path) -> None:
    gone = {label: NodeLostError("its raylet died") for label in ("eager float", "ort float")}
    node = PlantedNode("a", gone)
    search = search_on(plan, tmp_path, node, here={"ort int8": 0.002})
    search.all_trials()
    assert len(node.asked) == 1, "nothing is asked of a lost node"
    lost = search.known.records[node.asked[0].candidate]
    assert (lost.outcome, lost.node) == ("published", "")
    assert "node a: lost while it ran" in reported_text(search)
    assert "its trial runs elsewhere: its raylet died" in reported_text(search)
    assert search.best_with_artifact().candidate == Candidate(backend="ort", quant="int8")


def test_a_trial_that_loses_nodes_again_and_again_is_an_outcome(plan: Plan, tmp_path: Path) -> None:
    gone = {"ort float": NodeLostError("no answer")}
    nodes = [PlantedNode(str(number), gone) for number in range(ATTEMPTS)]
    search = search_on(plan, tmp_path, *nodes)
    search.nodes = list(nodes)  # type: ignore[arg-type]
    search.stage([Candidate(backend="ort")])
    record = search.known.records[Candidate(backend="ort")]
    assert record.outcome == "crashed"
    assert f"{ATTEMPTS} nodes were lost while they ran it, the last one: no answer" in record.reason


def test_the_winner_of_another_node_is_made_here(plan: Plan, tmp_path: Path) -> None:
    node = PlantedNode("a", {"ort int8": 0.001})
    search = search_on(plan, tmp_path, node, here={"ort int8": 0.001})
    search.nodes = [node]  # type: ignore[list-item]
    search.all_trials()
    assert search.known.best is not None
    assert (search.known.best.node, search.artifacts) == ("a", {})
    best = search.best_with_artifact()
    assert (best.candidate.label, best.node) == ("ort int8", "")
    assert best.candidate in search.artifacts


def test_an_error_of_the_source_on_a_node_ends_the_search(plan: Plan, tmp_path: Path) -> None:
    error = SourceError("damaged")
    node = PlantedNode("a", {"eager float": error, "ort float": error})
    search = search_on(plan, tmp_path, node)
    with pytest.raises(SourceError, match="damaged"):
        search.all_trials()
    assert search.nodes == [], "all nodes were closed"


def test_ray_address_without_ray_is_refused(plan: Plan, tmp_path: Path) -> None:
    from infer import search
    from infer.errors import UsageError

    with pytest.raises(UsageError, match="--ray-address names a cluster for --ray"):
        search(plan, Budgets(ray_address="127.0.0.1:6379"), tmp_path / "out.infer")
