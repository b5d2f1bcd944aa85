"""XGLM, and TrOCR's decoder with its attention: projections of their own, and a table of positions that grows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import NotUsableError
from . import Attend, Family, Replacement


def _attention(attend: Attend, module: Any, hidden_states: Tensor, *_: Any, **given: Any) -> Any:
    if given.get("key_value_states") is not None:
        raise NotUsableError("attention of this model reads keys other than those of its tokens")
    projections = (module.q_proj, module.k_proj, module.v_proj)
    heads = [p(hidden_states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for p in projections]
    return module.out_proj(attend(module, *heads, scaling=module.scaling).flatten(2)), None


def _positions(attend: Attend, module: Any, position_ids: Tensor, *_: Any) -> Tensor:
    """Read the table of positions without making it longer for the tokens of a call."""
    found: Tensor = module.weights.index_select(0, position_ids.flatten() + module.offset)
    return found.unflatten(0, position_ids.shape)


FAMILY = Family(
    attention={
        "TrOCRAttention": Replacement(_attention),
        "XGLMAttention": Replacement(_attention),
        "XGLMSinusoidalPositionalEmbedding": Replacement(_positions),
    }
)
