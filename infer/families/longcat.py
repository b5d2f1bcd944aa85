"""LongCat-Flash: zero-compute experts, which return their input."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels.expert_layers import StoredExperts
from . import Family


class _ZeroComputeExperts(StoredExperts):
    """Base of LongCat's experts, of which those behind the routed ones return their input.

    Its own class declares no layout; a token's share of such experts goes through the first one with weight zero.
    """

    is_transposed, has_bias, has_gate = False, False, True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self_: Any = self
        routed = top_k_index < self_.num_routed_experts
        index, weights = top_k_index.where(routed, 0), top_k_weights.where(routed, 0.0)
        kept = (top_k_weights - weights).sum(-1, keepdim=True)
        return super().forward(hidden_states, index, weights) + (hidden_states * kept).to(hidden_states.dtype)

    def _apply_gate(self, up: Tensor) -> Tensor:
        self_: Any = self
        gate, up = up.chunk(2, dim=-1)
        found: Tensor = self_.act_fn(gate) * up
        return found


FAMILY = Family(layers={"LongcatFlashExperts": _ZeroComputeExperts})
