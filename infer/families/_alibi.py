"""Attention with linear biases (Press et al., Train Short, Test Long, 2022), of BLOOM and Falcon."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head, float32 [heads]."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return torch.tensor(slopes)
