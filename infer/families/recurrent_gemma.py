"""RecurrentGemma: blocks of a convolution and a gated linear recurrence (RG-LRU) between those of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels.ops.state_space.state_call import StateCall
from . import Family


def _recurrent_block(layer: Any, x: Tensor, call: StateCall) -> tuple[Tensor, None]:
    """Compute RecurrentGemma's block: a convolution and the RG-LRU, gated by another branch."""
    unit, heads = layer.rg_lru, layer.rg_lru.num_attention_heads
    values = call.causal_conv(layer.linear_x(x), layer.conv_1d).to(x.dtype)
    by_head = values.unflatten(-1, (heads, -1)).transpose(0, 1)
    gates = [
        torch.sigmoid(torch.baddbmm(bias[:, None], by_head, weight).transpose(0, 1).flatten(1)).float()
        for weight, bias in (
            (unit.input_gate_weight, unit.input_gate_bias),
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
        )
    ]
    log_decay = -8.0 * gates[1] * functional.softplus(unit.recurrent_param.float())
    first = (call.positions == 0)[:, None]
    scale = torch.where(first, 1.0, torch.sqrt(1 - torch.exp(2 * log_decay)))
    decay = torch.where(first, 0.0, log_decay.exp())
    out = call.linear_scan(decay, values.float() * gates[0] * scale)
    return layer.linear_out(out.to(x.dtype) * layer.act_fn(layer.linear_y(x))), None


FAMILY = Family(mixers={"RecurrentGemmaRecurrentBlock": _recurrent_block})
