"""Train the tiny network in every process of a launch; the first one prints losses and a digest of the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from infer.tune.settings import TrainSettings
from infer.tune.training_loop import train
from tests.support.tiny_objective import TokenObjective, token_rows


def main(folder: Path, steps: int, micro_batch: int) -> None:
    """Print {"losses", "held_out", "norms", "weights"} of a run, resumed where the folder has a checkpoint."""
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
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank == 0:
        points = result.curve
        found = {
            "sharded": any(hasattr(each, "full_tensor") for each in objective.model.parameters()),
            "losses": [point.loss for point in points],
            "held_out": [point.held_out for point in points],
            "norms": [point.gradient_norm for point in points],
            "weights": weights,
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
