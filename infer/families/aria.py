"""Aria: MoE layers whose shared experts the exporter would bind to the length at capture."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import Family


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


FAMILY = Family(layers={"AriaTextMoELayer": _SharedOnInput})
