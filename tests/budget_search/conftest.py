"""A tiny model to search for, backends with planted faults, and a worker inside this process."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from infer import plugins
from infer.budget_search import run_search
from infer.budget_search.trial_loop import Search
from infer.budget_search.trial_process import session
from infer.budget_search.trial_process.messages import Setup
from infer.budget_search.trial_process.session import Session
from infer.budget_search.trial_process.worker_process import OnStep, TrialLimits
from infer.compress.assign.layer_timing import LayerTime, LayerTimer
from infer.plan import Plan
from infer.report.measurements.memory import Memory
from infer.report.search_record import TrialRecord
from infer.reporter import Reporter
from tests.support import planted_backends


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("search-source")
    torch.save(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)), folder / "model.pt")
    torch.save({"input": torch.randn(48, 64)}, folder / "data.pt")
    return folder


@pytest.fixture(scope="module", autouse=True)
def unmeasured_trials() -> Iterator[None]:
    """Skip the forks that measure memory of trials in this process: report/test_memory tests them."""
    with pytest.MonkeyPatch.context() as patch:
        unmeasured = Memory(failure="not measured in this test")
        patch.setattr(session, "ForkingProbe", lambda: SimpleNamespace(probe=lambda *_, **__: unmeasured))
        yield


@pytest.fixture(scope="module", autouse=True)
def untimed_layers() -> Iterator[None]:
    """Let layers of trials in this process take what float layers take: no timing decides a test."""
    paired = LayerTimer._paired

    def equal(timer: LayerTimer, *layer: Any) -> LayerTime:
        return replace(paired(timer, *layer), ratio=1.0, low=1.0, high=1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerTimer, "_paired", equal)
        patch.setattr(LayerTimer, "_key", lambda timer: f"untimed-{timer.backend}")  # none measured before
        yield


@pytest.fixture(autouse=True)
def own_timing_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test a machine's lock of its own, so that no other search makes it wait."""
    (tmp_path / "machine").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "machine"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture(scope="session")
def plan(source: Path) -> Plan:
    return Plan(
        source=str(source / "model.pt"),
        inputs=("input=float32[batch,64]",),
        data=str(source / "data.pt"),
        trust_code=True,
        batches=(1,),
        device="cpu",
    )


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the backends with planted faults, for this process and those that it starts."""
    folder = planted_backends.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    plugins._foreign.cache_clear()
    yield folder
    plugins._foreign.cache_clear()


class InProcess:
    """A worker without a process of its own, for tests of what is around it."""

    def __init__(self, setup: Setup, log: Path) -> None:
        self.setup, self.trials, self.alive = setup, 0, True
        self.session = Session(setup, Reporter())

    def ask(self, method: str, arguments: tuple[Any, ...], limits: TrialLimits, step: OnStep) -> Any:
        answer = getattr(self.session, method)(*arguments)
        self.trials += isinstance(answer, TrialRecord)
        return answer

    def close(self) -> None:
        self.alive = False


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the trials of a search in this process."""
    monkeypatch.setattr(run_search, "Search", functools.partial(Search, start=InProcess))
