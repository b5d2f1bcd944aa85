"""Doge: a dynamic mask, which adds a number made of its value to each key's logits and drops keys of long sequences."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import Attend, Family, Replacement


def _attention(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Any:
    """Attend with the number as one more column of the keys, which queries meet with the inverse of the scale."""
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim))
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    added = torch.exp(module.A * functional.softplus(module.dt_proj(value.flatten(2))))
    query, key, value = (x.transpose(1, 2) for x in (module.q_norm(query), module.k_norm(key), value))
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    inverse = torch.full_like(query[..., :1], 1 / module.scaling)
    query = functional.pad(torch.cat([query, inverse], -1), (0, 7))  # kernels take multiples of 8
    key = functional.pad(torch.cat([key, added.transpose(1, 2)[..., None].to(key.dtype)], -1), (0, 7))
    mixed = attend(module, query, key, value, scaling=module.scaling)
    return module.o_proj(mixed.flatten(2)), None


def _kept_keys(config: Any) -> tuple[int, str] | None:
    kept = int(config.keep_window_size or 0)
    if not 0 < kept < int(config.max_position_embeddings or 0):
        return None
    return kept, f"dynamic mask: longer sequences attend to the {kept} keys that it likes best"


FAMILY = Family(attention={"DogeAttention": Replacement(_attention)}, exact_lengths={"doge": _kept_keys})
