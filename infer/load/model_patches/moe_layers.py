"""Experts of a mixture, whose 3-D parameters become layers: formats quantize them, and a step is captured with them.

transformers stores the weights of all experts of a layer in 3-D parameters and computes with them by one of its
interchangeable functions; each of these loops over what a router gave or copies weights, which no exporter takes.
`split_experts` gives each parameter a layer that computes with one operator, `infer::linear_experts`. Routing, shared
experts and the gate (`_apply_gate`) stay the model's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import kernels  # noqa: F401  registers the operators

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


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


class _StoredExperts(nn.Module):
    """Base of experts classes of transformers whose projections are layers."""

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


class _ZeroComputeExperts(_StoredExperts):
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


class _SharedOnInput(nn.Module):
    """Base of Aria's MoE layer, whose shared experts read the input itself.

    Its own code gives them a view of a view, of which the exporter makes a constant of the length.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        self_: Any = self
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, index = self_.router(tokens)
        found: Tensor = self_.experts(tokens, index, weights).view(hidden_states.shape)
        return found + self_.shared_experts(hidden_states)


_LAYERS = {"AriaTextMoELayer": _SharedOnInput}
_EXPERTS = {"LongcatFlashExperts": _ZeroComputeExperts}  # that are no part of transformers' experts interface
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def split_experts(model: nn.Module) -> nn.Module:
    """Give the 3-D parameters of every experts module of transformers a layer, in place, with unchanged values.

    Returns `model`.
    """
    for module in list(model.modules()):
        if _is_experts(module):
            for name in PROJECTIONS:
                weight = module._parameters.pop(name, None)
                if weight is not None:
                    transposed = bool(getattr(module, "is_transposed", False))
                    module.add_module(name, ExpertLinear(weight, transposed=transposed))
            kind = type(module)
            if kind not in _CLASSES:
                stored = _EXPERTS.get(kind.__name__, _StoredExperts)
                _CLASSES[kind] = type(f"Stored{kind.__name__}", (stored, kind), {})
            module.__class__ = _CLASSES[kind]
        elif (base := _LAYERS.get(type(module).__name__)) is not None:
            module.__class__ = type(f"Stored{type(module).__name__}", (base, type(module)), {})
    return model


def checkpoint_names(model: nn.Module) -> dict[str, str]:
    """Return the parameter name of each split weight, and the name that it has in a checkpoint."""
    layers = (name for name, module in model.named_modules() if isinstance(module, ExpertLinear))
    return {f"{name}.weight": name for name in layers}


def _is_experts(module: nn.Module) -> bool:
    """Return true for a module of transformers' experts interface whose layout is the one it declares, or LongCat's."""
    flags = ("is_transposed", "has_bias", "_apply_gate")
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    weights = [module._parameters.get(name) for name in (first, "down_proj")]
    declared = type(module).__name__ in _EXPERTS or all(hasattr(module, flag) for flag in flags)
    return declared and all(w is not None and w.dim() == 3 for w in weights)
