"""Gated delta rule over a flat run of tokens (Yang et al., 2024, arXiv:2412.06464), of Qwen3-Next and Qwen3.5.

`infer::gated_delta`: query, key [tokens, Hk, Dk], value [tokens, Hv, Dv], decay [tokens, Hv] (its logarithm, at most 0)
and beta [tokens, Hv] → [tokens, Hv, Dv]. Each key head serves Hv / Hk consecutive value heads. Of each value head

    S = exp(decay) S;  S += key (beta (value - Sᵀ key))ᵀ;  out = Sᵀ query

State: S, [Hv, Dk, Dv]. See `state_cache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state_cache import STATE_ARGUMENTS, define_state_layer, each_segment


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
    state_cache: Tensor, segments: Tensor, offset: int,
) -> Tensor:  # fmt: skip
    """Compute the gated delta rule by its recurrence, token by token."""
    heads, width = value.shape[1:]
    times = heads // query.shape[1]
    query, key = (x.repeat_interleave(times, 1) for x in (query, key))
    out = torch.zeros_like(value)
    for segment in each_segment(state_cache, segments, offset, (heads, query.shape[2], width)):
        state = segment.state
        for t in range(segment.tokens.start, segment.tokens.stop):
            state = state * decay[t].exp()[:, None, None]
            seen = torch.einsum("hkv,hk->hv", state, key[t])
            state = state + key[t][:, :, None] * (beta[t][:, None] * (value[t] - seen))[:, None]
            out[t] = torch.einsum("hkv,hk->hv", state, query[t])
        segment.keep(state)
    return out


def _shape(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return value.new_empty(value.shape)


_ARGUMENTS = f"Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, {STATE_ARGUMENTS}"
define_state_layer(f"gated_delta({_ARGUMENTS})", gated_delta, _shape)
