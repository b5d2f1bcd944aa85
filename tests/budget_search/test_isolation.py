"""A trial that crashes, hangs, fills memory or disk is an outcome with a reason, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infer.budget_search.trial_process.messages import Setup, TrialRequest
from infer.budget_search.trial_process.worker_process import TrialEndedError, TrialLimits, WorkerProcess
from infer.plan import Plan
from infer.report.search_record import Candidate, TrialRecord
from tests.support.planted_backends import descendants_of, is_running, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process limits are those of Linux")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def worker(plan: Plan, tmp_path: Path, planted: Path) -> Iterator[Callable[..., WorkerProcess]]:
    made: list[WorkerProcess] = []

    def start(**changes: object) -> WorkerProcess:
        setup = Setup(plan=plan.with_(**changes), name="model.infer", work=str(tmp_path))
        made.append(WorkerProcess(setup, tmp_path / f"log-{len(made)}"))
        return made[-1]

    yield start
    for one in made:
        one.close()


def ask(worker: WorkerProcess, backend: str, **limits: float) -> TrialRecord | TrialEndedError:
    request = TrialRequest(number=worker.trials, candidate=Candidate(backend=backend))
    try:
        return worker.ask("run", (request,), TrialLimits(**limits), lambda name, detail: None)  # type: ignore
    except TrialEndedError as ended:
        return ended


def test_a_worker_survives_refusals_and_a_crash_is_an_outcome(worker: Callable[..., WorkerProcess]) -> None:
    one = worker()
    broken = ask(one, "broken")
    assert broken.outcome == "refused"
    assert (
        "broken could not lower this model: RuntimeError: compiler error: unknown opcode 7" in broken.reason
    )
    full = ask(one, "full_disk")
    assert (full.outcome, one.alive) == ("disk full", True)
    wrong = ask(one, "wrong")
    assert isinstance(wrong, TrialRecord)
    assert wrong.outcome == "refused"
    assert "not faithful enough" in wrong.reason
    assert wrong.measured is not None
    assert not wrong.measured.faithful
    crashed = ask(one, "segfault")
    assert crashed.outcome == "crashed"
    assert "SIGSEGV" in crashed.reason
    assert "in string_at" in crashed.reason
    assert not one.alive


def test_a_hang_is_ended_at_its_time(worker: Callable[..., WorkerProcess]) -> None:
    one = worker()
    ended = ask(one, "hang", seconds=1.0)
    assert ended.outcome == "timed out"
    assert "longer than 1 s" in ended.reason
    assert not one.alive


def test_memory_above_the_limit_ends_a_trial(worker: Callable[..., WorkerProcess]) -> None:
    ended = ask(worker(), "eater", memory=1_500_000_000)
    assert ended.outcome == "out of memory"
    assert "1500 MB are allowed" in ended.reason


def test_a_disk_that_runs_full_ends_a_trial(worker: Callable[..., WorkerProcess]) -> None:
    ended = ask(worker(), "hang", disk_free=1 << 60)
    assert ended.outcome == "disk full"


def started(plan: Plan, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    words = ["optimize", plan.source, "--data", str(plan.data), "--input", plan.inputs[0], "--trust-code"]
    words += ["-o", str(tmp_path / "out.infer"), "--batch", "1", "--for", "size", *options]
    paths = [str(tmp_path / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "infer", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def family_with_compiler(pid: int) -> list[int]:
    """Return the processes below a search once the planted compiler is one of them."""
    family = descendants_of(pid)
    names = [Path(f"/proc/{one}/comm").read_text().strip() for one in family if is_running(one)]
    return family if "sleep" in names else []


def test_sigkill_of_the_search_leaves_no_process(plan: Plan, tmp_path: Path, planted: Path) -> None:
    with started(plan, tmp_path, "--space", "backend=hang", "--space", "quant=none") as search:
        workers = wait_until(lambda: family_with_compiler(search.pid))
        search.kill()
        search.wait()
        wait_until(lambda: not any(is_running(pid) for pid in workers))
    assert not (tmp_path / "out.infer").exists()


@pytest.mark.parametrize("keep", [pytest.param(True, marks=pytest.mark.slow), False], ids=["kept", "dropped"])
def test_ctrl_c_publishes_the_best_so_far_only_when_asked(
    plan: Plan, tmp_path: Path, planted: Path, keep: bool
) -> None:
    backends = "backend=eager,hang" if keep else "backend=hang"
    options = ["--space", backends, "--space", "quant=none", *(["--keep-best"] if keep else [])]
    with started(plan, tmp_path, *options) as search:
        assert search.stderr is not None
        for line in search.stderr:
            if "hang" in line:
                break
        workers = wait_until(lambda: family_with_compiler(search.pid))
        search.send_signal(signal.SIGINT)
        said = search.communicate(timeout=60)[1]
    assert not any(is_running(pid) for pid in workers)
    assert (tmp_path / "out.infer" / "manifest.json").exists() is keep
    assert search.returncode == (0 if keep else 130), said
    assert not list(tmp_path.glob(".out.infer.tmp*"))
