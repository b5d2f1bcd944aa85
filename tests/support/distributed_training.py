"""Train the tiny network in every process of a launch; the first one prints losses and a digest of the weights.

python -m tests.support.distributed_training FOLDER STEPS MICRO_BATCH RUNS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from infer.tune.settings import TrainSettings
from infer.tune.training_loop import train
from tests.support.tiny_objective import TokenObjective, token_rows


def trained(folder: Path, steps: int, micro_batch: int) -> dict[str, Any]:
    """Return {"losses", "held_out", "norms", "weights"} of a run, resumed where the folder has a checkpoint."""
    objective = TokenObjective()
    settings = TrainSettings(
        steps=steps,
        epochs=99,
        batch=7,
        micro_batch=micro_batch,
        learning_rate=0.01,
        measure_every=2,
        schedule="constant",
    )
    result = train(objective, token_rows(), token_rows(5, seed=2), settings, folder)
    weights = {}
    for name, parameter in objective.model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[name] = float(whole.detach().double().square().sum())
    points = result.curve
    return {
        "sharded": any(hasattr(each, "full_tensor") for each in objective.model.parameters()),
        "losses": [point.loss for point in points],
        "held_out": [point.held_out for point in points],
        "norms": [point.gradient_norm for point in points],
        "weights": weights,
    }


def main(folder: Path, steps: int, micro_batch: int, runs: int) -> None:
    """Print what each of `runs` runs in the folder gives; all but the first go on from its last checkpoint."""
    found = [trained(folder, steps, micro_batch) for _ in range(runs)]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
