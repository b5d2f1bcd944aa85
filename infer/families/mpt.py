"""MPT: attention of its own with ALiBi, whose slopes differ from BLOOM's where heads are no power of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import Attend, Family, Replacement


def _attention(attend: Attend, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = [x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2)]
    # transformers does not read attn_config.alibi: the bias is always added.
    slopes = _slopes(module.n_heads).to(hidden_states.device)
    out = attend(module, *heads, scaling=module.softmax_scale, slopes=slopes)
    return module.out_proj(out.flatten(2)), None


def _slopes(heads: int) -> Tensor:
    """Return the slopes, float32 [heads]: those of the next power of two, every second one first."""
    whole = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    return torch.tensor(slopes if whole == heads else [*slopes[1::2], *slopes[::2]][:heads])


FAMILY = Family(attention={"MptAttention": Replacement(_attention)})
