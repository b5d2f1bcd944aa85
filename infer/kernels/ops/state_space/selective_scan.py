"""State space models over a flat run of tokens: Mamba (Gu and Dao, 2023) and Mamba2 (Dao and Gu, 2024).

`infer::selective_scan` (arXiv:2312.00752): x and step [tokens, C], a [N, C] (negative), b and c [tokens, G, N], of G
groups of channels → [tokens, C]. State h [N, C]:

    h = exp(step a) h + b step x;  out = sum over N of c h

`infer::ssd_scan` (arXiv:2405.21060): x [tokens, H, P], step [tokens, H], a [H], b and c [tokens, G, N], of G groups of
consecutive heads → [tokens, H, P]. State h [H, N, P], by the same recurrence. See `state_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state_cache import STATE_ARGUMENTS, define_state_layer, each_segment


def selective_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state_cache: Tensor,
    segments: Tensor,
    offset: int,
) -> Tensor:
    """Compute Mamba's selective scan by its recurrence, token by token."""
    times = x.shape[1] // b.shape[1]
    b, c = (part.transpose(1, 2).repeat_interleave(times, 2) for part in (b, c))  # [tokens, N, C]
    out = torch.zeros_like(x)
    for segment in each_segment(state_cache, segments, offset, tuple(a.shape)):
        state = segment.state
        for t in range(segment.tokens.start, segment.tokens.stop):
            state = (step[t] * a).exp() * state + b[t] * (step[t] * x[t])
            out[t] = (c[t] * state).sum(0)
        segment.keep(state)
    return out


def ssd_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state_cache: Tensor,
    segments: Tensor,
    offset: int,
) -> Tensor:
    """Compute Mamba2's scan by its recurrence, token by token."""
    heads, width = x.shape[1:]
    times = heads // b.shape[1]
    b, c = (part.repeat_interleave(times, 1) for part in (b, c))  # [tokens, H, N]
    out = torch.zeros_like(x)
    for segment in each_segment(state_cache, segments, offset, (heads, b.shape[2], width)):
        state = segment.state
        for t in range(segment.tokens.start, segment.tokens.stop):
            new = b[t][:, :, None] * (step[t][:, None] * x[t])[:, None]
            state = (step[t] * a).exp()[:, None, None] * state + new
            out[t] = torch.einsum("hn,hnp->hp", c[t], state)
        segment.keep(state)
    return out


def _shape(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


_ARGUMENTS = f"Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, {STATE_ARGUMENTS}"
define_state_layer(f"selective_scan({_ARGUMENTS})", selective_scan, _shape)
define_state_layer(f"ssd_scan({_ARGUMENTS})", ssd_scan, _shape)
