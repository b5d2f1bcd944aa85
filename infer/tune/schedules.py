"""Learning rate over a run: a factor for each share of the budget that is used up."""

from __future__ import annotations

import math

DECAY = 0.2  # share of the run in which wsd falls
FLOOR = 0.1  # of the largest learning rate, at the end of cosine


def factor(schedule: str, share: float, warmup: float) -> float:
    """Return the factor of the learning rate at `share` (0 to 1) of the run.

    It rises linearly to 1 during `warmup`. cosine then falls to `FLOOR`, linear to 0; wsd (Hu et al. 2024, MiniCPM)
    stays and falls linearly to 0 in the last fifth; constant stays.
    """
    share = min(max(share, 0.0), 1.0)
    if share < warmup:
        return max(share / warmup, 0.01)  # a run whose budget is time starts at share 0
    rest = (share - warmup) / (1 - warmup) if warmup < 1 else 0.0
    if schedule == "cosine":
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * rest)) / 2
    if schedule == "linear":
        return 1 - rest
    if schedule == "wsd":
        return min(1.0, (1 - share) / DECAY)
    return 1.0
