"""Linear recurrence of each channel over a flat run of tokens: the RG-LRU of RecurrentGemma.

`infer::linear_scan` (De et al., 2024, arXiv:2402.19427): decay and x [tokens, C] → h [tokens, C] with h = decay h + x.
State: h, [C]. See `state_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state_cache import STATE_ARGUMENTS, define_state_layer, each_segment


def linear_scan(decay: Tensor, x: Tensor, state_cache: Tensor, segments: Tensor, offset: int) -> Tensor:
    """Compute the linear scan by its recurrence, token by token."""
    out = torch.zeros_like(x)
    for segment in each_segment(state_cache, segments, offset, tuple(x.shape[1:])):
        state = segment.state
        for t in range(segment.tokens.start, segment.tokens.stop):
            state = decay[t] * state + x[t]
            out[t] = state
        segment.keep(state)
    return out


def _shape(decay: Tensor, x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


define_state_layer(f"linear_scan(Tensor decay, Tensor x, {STATE_ARGUMENTS})", linear_scan, _shape)
