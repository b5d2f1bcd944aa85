"""Gated delta rule with a convolution before it, of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.ops.state_space.state_call import StateCall


def _normalized(x: Tensor) -> Tensor:
    """Scale the last dimension to length one, as transformers' l2norm does."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(layer: Any, qkv: Tensor, a: Tensor, b: Tensor, call: StateCall) -> Tensor:
    """Convolve qkv [tokens, channels] and apply the gated delta rule: float32 [tokens, Hv, Dv]."""
    mixed = call.causal_conv(qkv, layer.conv1d, layer.activation)
    parts = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    query, key = (_normalized(part.unflatten(-1, (-1, layer.head_k_dim))) for part in parts[:2])
    value = parts[2].unflatten(-1, (-1, layer.head_v_dim))
    decay = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias)
    return call.gated_delta(query * layer.head_k_dim**-0.5, key, value, decay, b)
