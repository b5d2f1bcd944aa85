"""Mamba (Gu and Dao, 2023), FalconMamba and Jamba: a state space model with a decay for each channel and state."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ..kernels.ops.state_space.state_call import StateCall
from . import Family


def _mamba(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """Compute a Mamba layer; FalconMamba and Jamba have norms between the projections."""
    values, gate = layer.in_proj(x).chunk(2, -1)
    values = call.causal_conv(values, layer.conv1d, layer.activation)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    step, b, c = layer.x_proj(values.to(x.dtype)).split(sizes, -1)
    if hasattr(layer, "dt_layernorm"):
        step, b, c = layer.dt_layernorm(step), layer.b_layernorm(b), layer.c_layernorm(c)
    step = functional.softplus(layer.dt_proj(step).float())
    a = -layer.A_log.float().exp().t()
    out = call.selective_scan(values, step, a, b[:, None], c[:, None]) + layer.D.float() * values
    return layer.out_proj((out * functional.silu(gate.float())).to(x.dtype))  # type: ignore[no-any-return]


FAMILY = Family(mixers=dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), _mamba))
