"""Mamba2 (Dao and Gu, 2024) and hybrids with its layers: Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from ..kernels.ops.state_space.state_call import StateCall
from . import Family


def _mamba2(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """Compute a Mamba2 layer: one projection, a convolution, the scan, a gated norm."""
    projected = layer.in_proj(x * getattr(layer, "ssm_in_multiplier", 1.0))
    projected = projected * layer.mup_vector[0, 0] if hasattr(layer, "mup_vector") else projected
    inner, states = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
    gate, mixed, step = projected.split([inner, layer.conv_dim, layer.num_heads], -1)
    values, b, c = call.causal_conv(mixed, layer.conv1d, layer.activation).split([inner, states, states], -1)
    step = functional.softplus(step.float() + layer.dt_bias.float()).clamp(*layer.time_step_limit)
    values = values.unflatten(-1, (layer.num_heads, layer.head_dim))
    b, c = (part.unflatten(-1, (layer.n_groups, -1)) for part in (b, c))
    out = call.ssd_scan(values, step, -layer.A_log.float().exp(), b, c) + layer.D.float()[:, None] * values
    flat = out.flatten(1).to(x.dtype)
    plain = not getattr(layer, "mamba_rms_norm", True)
    normed = flat * functional.silu(gate) if plain else layer.norm(flat, gate)
    return layer.out_proj(normed.to(x.dtype))  # type: ignore[no-any-return]


FAMILY = Family(
    mixers={
        "BambaMixer": _mamba2,
        "FalconH1Mixer": _mamba2,
        "GraniteMoeHybridMambaLayer": _mamba2,
        "Mamba2Mixer": _mamba2,
        "NemotronHMamba2Mixer": _mamba2,
        "Zamba2MambaMixer": _mamba2,
    }
)
