"""Checkpoints: a killed run goes on bit for bit, and a damaged or foreign checkpoint is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infer.errors import SourceError
from infer.tune import checkpoints
from infer.tune.training_state import TrainState
from tests.conftest import ROOT

KILLS = 2  # `make endure` kills twenty times
OPTIMIZERS = ["muon", "adamw8bit"]


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Digests of runs that were killed and left alone, by optimizer; one process imports torch for all."""
    words = ["-m", "tests.support.killed_training", str(tmp_path_factory.mktemp("killed")), str(KILLS), "1"]
    done = subprocess.run(
        [sys.executable, *words, ",".join(OPTIMIZERS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=580,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.chaos
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_killed_at_random_steps_ends_bit_equal(optimizer: str, killed_runs: dict[str, Any]) -> None:
    found = killed_runs[optimizer]
    assert len(found["steps"]) == KILLS
    assert found["digests"][0] == found["digests"][1]


def saved(
    folder: Path, step: int = 3
) -> tuple[dict[str, nn.Parameter], list[torch.optim.Optimizer], TrainState]:
    parameters = {"weight": nn.Parameter(torch.randn(4, 3)), "bias": nn.Parameter(torch.randn(4))}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = TrainState(identity={"data": "a"}, step=step)
    checkpoints.save_checkpoint(folder, state, checkpoints.run_tensors(parameters, [optimizer]))
    return parameters, [optimizer], state


def test_a_checkpoint_gives_back_every_bit(tmp_path: Path) -> None:
    parameters, (optimizer,), state = saved(tmp_path)
    found = checkpoints.load_checkpoint(tmp_path, {"data": "a"})
    assert found is not None
    assert found[0] == state
    others = {name: nn.Parameter(torch.zeros_like(each)) for name, each in parameters.items()}
    other = torch.optim.AdamW(others.values(), lr=0.1)
    checkpoints.restore(others, [other], found[1])
    for name, parameter in parameters.items():
        assert torch.equal(others[name], parameter)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(other.state[others[name]][key], value)


def test_only_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        saved(tmp_path, step)
    (tmp_path / ".step-00000011.tmp").mkdir()  # of a process that was killed while it wrote
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000010"]
    found = checkpoints.load_checkpoint(tmp_path, {})
    assert found is not None
    assert found[0].step == 10


@pytest.mark.parametrize("name", [checkpoints.STATE, checkpoints.TENSORS])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    saved(tmp_path)
    (tmp_path / "step-00000003" / name).write_bytes(b"damaged")
    with pytest.raises(SourceError, match=r"the checkpoint can't be read.*--fresh"):
        checkpoints.load_checkpoint(tmp_path, {})
