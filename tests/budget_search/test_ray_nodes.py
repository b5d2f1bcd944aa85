"""A search on a real Ray cluster of three nodes, one of which dies while it runs a trial."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

import infer
from infer import Budgets, Plan, Predictor
from infer.budget_search import ray_nodes
from infer.budget_search.run_search import SearchResult
from infer.errors import NotUsableError, UsageError
from infer.report.search_record import Candidate
from tests.budget_search.test_parallel_trials import Findings
from tests.support import planted_backends
from tests.support.planted_backends import is_running, wait_until

ROOT = Path(__file__).resolve().parents[2]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make ray")


@pytest.fixture
def gate(tmp_path: Path, planted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Close the gate that the backend `gated` waits at, on all nodes."""
    found = tmp_path / "gate"
    found.touch()
    monkeypatch.setenv(planted_backends.GATE, str(found))
    return found


@pytest.fixture
def cluster(gate: Path, planted: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a node for the search and two others, of one CPU each."""
    short = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # noqa: S108 - sockets need a short path
    paths = [str(planted), str(ROOT), os.environ.get("PYTHONPATH", "")]
    for name, value in {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": short,
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        made.others = [made.add_node(**{**node, "include_dashboard": None}) for _ in range(2)]
        yield made
    finally:
        made.shutdown()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if short in " ".join(process.cmdline()):
                    process.kill()
        shutil.rmtree(short, ignore_errors=True)


def die(node: Any) -> None:
    """Kill all processes of a node at once, like a power loss."""
    for _, processes in node.live_processes():
        family = psutil.Process(processes.pid)
        for one in [family, *family.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                one.kill()


@needs_ray
@pytest.mark.slow
def test_a_killed_node_costs_no_trial_and_the_winner_is_right(
    plan: Plan, tmp_path: Path, cluster: Any, gate: Path
) -> None:
    said, died = Findings(), list[int]()

    def kill_the_node_that_waits() -> None:
        pid = int(
            wait_until(lambda: gate.with_suffix(".waits").exists() and gate.with_suffix(".waits").read_text())
        )
        above = {one.pid for one in psutil.Process(pid).parents()}
        for node in cluster.others:
            if above & {process.pid for _, process in node.live_processes()}:
                die(node)
                died.append(pid)
        gate.unlink()

    killer = threading.Thread(target=kill_the_node_that_waits)
    killer.start()
    result = infer.search(
        plan,
        Budgets(
            space={"backend": ("eager", "gated", "broken"), "quant": ("none", "int8")},
            objective="size",
            ray=True,
            ray_address=cluster.address,
            fresh=True,
        ),
        tmp_path / "best.infer",
        reporter=said,
    )
    killer.join()
    assert isinstance(result, SearchResult)
    text = "\n".join(said.said)
    assert died, f"no other node ran the gated trial: {text}"
    assert not is_running(died[0]), "what the dead node ran ended with it"
    assert "runs trials" in text
    assert "lost while it ran gated" in text
    outcomes = {t.candidate.label: t.record.outcome for t in result.trials}
    assert outcomes["gated float"] == "published"
    assert outcomes["broken float"] == "refused"
    assert any(t.record.node for t in result.trials), "another node ran a trial"
    assert result.best.candidate in (Candidate(backend=name, quant="int8") for name in ("eager", "gated"))
    with Predictor.load(result.path):
        pass


def test_a_node_that_lacks_the_source_is_left_out() -> None:
    here = {"source": "a", "libraries": "b", "machine": "this one"}
    assert ray_nodes.difference(here, dict(here)) == ""
    assert ray_nodes.difference(here, {**here, "source": "x"}) == "not the same there: source"
    assert ray_nodes.difference(here, {**here, "machine": "x"}) == "not the same there: machine"


def test_without_ray_or_a_cluster_a_search_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a search with --ray must run on a node of the cluster"):
        ray_nodes.connect("ray://127.0.0.1:10001")
    monkeypatch.setattr(ray_nodes, "find_spec", lambda name: None)
    with pytest.raises(NotUsableError, match="a search on a cluster needs ray") as caught:
        ray_nodes.connect("auto")
    assert "infer-engine[ray]" in caught.value.hint


@needs_ray
@pytest.mark.skipif(sys.platform != "linux", reason="one port that nothing listens on")
def test_an_address_without_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_connect_timeout_s", "2")
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")
    with pytest.raises(NotUsableError, match="no Ray cluster at auto"):
        ray_nodes.connect("auto")
