"""Layers of the experts of a mixture: a projection of all experts is one call of `infer::linear_experts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ExpertLinear(nn.Module):
    """One linear layer of E experts: weight [E, N, K], or [E, K, N] when `transposed`.

    x [R, K], expert int64 [R * top_k] → [R * top_k, N]: row i of x goes to `top_k` experts that follow each other.
    """

    def __init__(self, weight: nn.Parameter, *, transposed: bool) -> None:
        super().__init__()
        self.weight, self.transposed = weight, transposed
        self.num_experts = weight.shape[0]
        self.out_features, self.in_features = weight.shape[1:] if not transposed else weight.shape[:0:-1]

    def forward(self, x: Tensor, expert: Tensor, top_k: int) -> Tensor:
        return torch.ops.infer.linear_experts(x, expert, self.weight, top_k, self.transposed)

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, in_features={self.in_features}, out_features={self.out_features}"


class StoredExperts(nn.Module):
    """Base of experts classes of transformers whose projections are `ExpertLinear`."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of each token's experts: [T, H], int64 [T, k], [T, k] → [T, H]."""
        self_: Any = self
        top_k, expert = top_k_index.shape[-1], top_k_index.reshape(-1)
        up = self._project("gate_up_proj" if self_.has_gate else "up_proj", hidden_states, expert, top_k)
        y = self._project(
            "down_proj", self_._apply_gate(up) if self_.has_gate else self_.act_fn(up), expert, 1
        )
        if getattr(self, "has_post_expert_norm", False):
            y = self_.post_expert_norm(y)
        y = y * top_k_weights.reshape(-1, 1)
        return y.reshape(-1, top_k, y.shape[-1]).sum(1).to(hidden_states.dtype)

    def _project(self, name: str, x: Tensor, expert: Tensor, top_k: int) -> Tensor:
        y = getattr(self, name)(x, expert, top_k)
        bias = self._parameters.get(f"{name}_bias")
        return y if bias is None else y + bias[expert]
