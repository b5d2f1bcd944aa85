"""Falcon: fused projections in groups of heads, and rotary positions or ALiBi."""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import Tensor

from ..errors import NotUsableError
from . import Attend, Family, Replacement
from ._alibi import alibi_slopes


def _attention(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **__: Any,
) -> Any:
    """Attend without repeating the keys and values of a group for each of its queries."""
    fused, heads = module.query_key_value(hidden_states), module.num_heads
    if module.new_decoder_architecture:
        groups = module.num_kv_heads
        named = fused.unflatten(-1, (groups, heads // groups + 2, -1))
        query, key, value = named[..., :-2, :].flatten(2, 3), named[..., -2, :], named[..., -1, :]
    else:
        query, key, value = module._split_heads(fused)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    slopes = None
    if alibi is None:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        cos, sin = position_embeddings or (None, None)
        query, key = rotate(query, key, cos, sin)
    else:
        slopes = _slopes(module).to(hidden_states.device)
    out = attend(module, query, key, value, scaling=module.head_dim**-0.5, slopes=slopes)
    return module.dense(out.flatten(2)), None


def _slopes(module: Any) -> Tensor:
    """Return the slopes, bfloat16: Falcon rounds slope times position to that, and scales the bias as well."""
    if math.log2(module.head_dim) % 2:
        raise NotUsableError(
            f"the ALiBi bias of this model is rounded before it is divided by the square root of {module.head_dim}, "
            "which is no power of two: the operator would round it otherwise"
        )
    return (alibi_slopes(module.num_heads) * module.head_dim**-0.5).bfloat16()


FAMILY = Family(attention={"FalconAttention": Replacement(_attention)})
