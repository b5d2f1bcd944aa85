"""Runs of several processes: losses and weights are those of one, and what can't be exact is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.errors import NotUsableError
from infer.tune.prepared_model import micro_batches
from infer.tune.settings import TrainSettings
from infer.tune.training_environment import _check_sharding, new_accelerator
from tests.conftest import ROOT
from tests.support.distributed_training import trained

LAUNCH = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
STEPS, MICRO_BATCH = 6, 2
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}


def launched(kind: str, folder: Path, runs: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment |= SHARDED if kind == "FSDP" else {}
    asked = map(str, (folder, STEPS, MICRO_BATCH, runs))
    words = [sys.executable, *LAUNCH, "-m", "tests.support.distributed_training", *asked]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and weights of one process, this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        return trained(tmp_path_factory.mktemp("one"), STEPS, MICRO_BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_two_processes_have_the_losses_and_weights_of_one(
    kind: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    found, *again = launched(kind, tmp_path / "two", 2 if kind == "FSDP" else 1)
    assert found["sharded"] is (kind == "FSDP")
    for name in ("losses", "norms"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5)
    for resumed in again:  # from the last checkpoint, without a step
        assert resumed["weights"] == found["weights"]
        assert resumed["losses"] == found["losses"]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("size", [None, 1, 2, 100])
def test_every_row_is_in_one_micro_batch_of_one_process(processes: int, size: int | None) -> None:
    parts = [micro_batches(range(10, 17), size, process, processes) for process in range(processes)]
    assert len({len(lists) for lists in parts}) == 1
    assert sorted(row for lists in parts for one in lists for row in one) == list(range(10, 17))
    assert all(len(one) <= (size or 7) for lists in parts for one in lists)


def test_deepspeed_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(NotUsableError, match="not the mean over all tokens.*fsdp_version: 2"):
        new_accelerator(TrainSettings())


@pytest.mark.parametrize(
    ("version", "optimizer", "words"),
    [(1, "adamw", "fsdp_version: 2"), (2, "muon", "muon needs whole parameters")],
)
def test_models_that_can_not_be_sharded_are_refused(version: int, optimizer: str, words: str) -> None:
    accelerator = SimpleNamespace(is_fsdp2=version == 2)
    with pytest.raises(NotUsableError, match=words):
        _check_sharding(accelerator, TrainSettings(optimizer=optimizer))
