"""BLOOM: attention of its own with ALiBi, which the operator computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import Attend, Family, Replacement
from ._alibi import alibi_slopes


def _attention(
    attend: Attend, module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any
) -> Any:
    fused = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, -1))
    query, key, value = (part.transpose(1, 2) for part in fused.unbind(-2))
    slopes = alibi_slopes(module.num_heads).to(hidden_states.device)
    mixed = attend(module, query, key, value, scaling=module.inv_norm_factor, slopes=slopes)
    return residual + module.dense(mixed.flatten(2)), None


FAMILY = Family(attention={"BloomAttention": Replacement(_attention)})
