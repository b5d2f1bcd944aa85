"""Depthwise causal convolution over a flat run of tokens, the last inputs of each sequence kept in a state cache.

`infer::causal_conv`: x [tokens, C], weight [C, K], bias [C] or None → [tokens, C], with `silu` after the activation of
that name. State: the K - 1 inputs before the next token, [K - 1, C]. See `state_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state_cache import STATE_ARGUMENTS, define_state_layer, each_segment


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state_cache: Tensor,
    segments: Tensor,
    offset: int,
    silu: bool,
) -> Tensor:
    """Compute the causal convolution by its definition, segment by segment."""
    channels, width = weight.shape
    out = torch.zeros_like(x)
    for segment in each_segment(state_cache, segments, offset, (width - 1, channels)):
        new = x[segment.tokens]
        seen = torch.cat([segment.state, new])
        taps = [seen[k : k + len(new)] * weight[:, k] for k in range(width)]
        total = torch.stack(taps).sum(0)
        total = total if bias is None else total + bias
        out[segment.tokens] = torch.nn.functional.silu(total) if silu else total
        segment.keep(seen[len(new) :])
    return out


def _shape(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


_ARGUMENTS = f"Tensor x, Tensor weight, Tensor? bias, {STATE_ARGUMENTS}, bool silu"
define_state_layer(f"causal_conv({_ARGUMENTS})", causal_conv, _shape)
