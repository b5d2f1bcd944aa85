"""Operands of the layers over a state cache, random, for `TOKENS` tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS = 11


def state_operands(name: str, width: int, generator: torch.Generator) -> tuple[list[Any], list[Any], int]:
    """Make the operands before and behind the state arguments, and the floats of the state."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if name == "causal_conv":
        return [normal(TOKENS, width), normal(width, 4), normal(width)], [True], 3 * width
    if name == "linear_scan":
        return [normal(TOKENS, width).sigmoid(), normal(TOKENS, width)], [], width
    if name == "gated_delta":
        key = torch.nn.functional.normalize(normal(TOKENS, 2, 7), dim=-1)
        decay, beta = -normal(TOKENS, 4).abs(), normal(TOKENS, 4).sigmoid()
        return [normal(TOKENS, 2, 7), key, normal(TOKENS, 4, width), decay, beta], [], 4 * 7 * width
    b, c = normal(TOKENS, 2, 5), normal(TOKENS, 2, 5)
    if name == "ssd_scan":
        step, a = normal(TOKENS, 4).abs(), -normal(4).abs()
        return [normal(TOKENS, 4, width), step, a, b, c], [], 4 * 5 * width
    x, step, a = normal(TOKENS, 2 * width), normal(TOKENS, 2 * width).abs(), -normal(5, 2 * width).abs()
    return [x, step, a, b, c], [], 5 * 2 * width
