"""Kill training runs at random steps and let them go on; print digests of each and of one that was left alone.

python -m tests.support.killed_training FOLDER KILLS SEED OPTIMIZER,OPTIMIZER
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  imported once, before the forks

from infer.tune.data.rows import digest_of
from infer.tune.settings import TrainSettings
from infer.tune.training_loop import train
from tests.support.tiny_objective import TokenObjective, token_rows

STEPS = 40


def trained(folder: Path, optimizer: str) -> str:
    """Train, or go on, and return a digest of all weights, losses and held-out measures."""
    objective = TokenObjective(dropout=0.3)
    settings = TrainSettings(
        steps=STEPS,
        batch=6,
        micro_batch=4,
        learning_rate=0.01,
        measure_every=3,
        optimizer=optimizer,
        checkpoint_every=0,
    )
    result = train(objective, token_rows(), token_rows(7, seed=2), settings, folder)
    curve = [(point.step, point.loss, point.gradient_norm, point.held_out) for point in result.curve]
    said = json.dumps([curve, result.terms, result.best_step, result.best_held_out])
    return digest_of(objective.model.state_dict()) + hashlib.sha256(said.encode()).hexdigest()


def start(folder: Path, optimizer: str) -> int:
    """Fork a process that trains and leaves its digest beside the folder."""
    if pid := os.fork():
        return pid
    folder.with_suffix(".digest").write_text(trained(folder, optimizer))
    os._exit(0)


def kill_at(pid: int, folder: Path, step: int, delay: float) -> None:
    """Kill the process some time after its checkpoint of the step was seen."""
    while not any(int(path.name[5:]) >= step for path in folder.glob("step-*")):
        done, _ = os.waitpid(pid, os.WNOHANG)
        if done:
            raise SystemExit("the run ended before it was killed")
        time.sleep(0.0005)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def run_killed(home: Path, kills: int, seed: int, optimizer: str) -> dict[str, Any]:
    """Return both digests and the steps of the kills; `home` is made."""
    draw = random.Random(seed)
    home.mkdir()
    os.waitpid(start(home / "whole", optimizer), 0)
    steps = sorted(draw.sample(range(1, STEPS - 3), kills))
    for step in steps:
        kill_at(start(home / "killed", optimizer), home / "killed", step, draw.uniform(0, 0.01))
    os.waitpid(start(home / "killed", optimizer), 0)
    return {
        "digests": [(home / f"{name}.digest").read_text() for name in ("whole", "killed")],
        "steps": steps,
    }


def main(home: Path, kills: int, seed: int, optimizers: list[str]) -> int:
    """Print what `run_killed` returns for each optimizer; return the exit code, 1 where digests differ."""
    found = {optimizer: run_killed(home / optimizer, kills, seed, optimizer) for optimizer in optimizers}
    print(json.dumps(found))
    return int(any(len(set(one["digests"])) > 1 for one in found.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(",")))
