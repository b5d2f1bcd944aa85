"""Longformer's attention as one masked attention, in place of chunks whose number depends on the values of tensors.

A token attends to its window and to the global tokens; a global token attends to all, by projections of its own
(Beltagy et al. 2020, https://arxiv.org/abs/2004.05150). Memory grows with the square of the length, which is at most
4096 in published checkpoints.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Family

# Heads that name global tokens by themselves.
_WITH_GLOBAL = ("ForSequenceClassification", "ForQuestionAnswering")


def _use_masked_attention(model: nn.Module) -> nn.Module:
    """Replace the attention of a model in place and return it."""
    head = type(model).__name__
    for module in model.modules():
        if type(module).__name__ == "LongformerSelfAttention":
            made = _forward(has_global=head.endswith(_WITH_GLOBAL))
            module.forward = MethodType(made, module)  # type: ignore[method-assign]
        elif hasattr(module, "_pad_to_window_size"):
            module._pad_to_window_size = _unpadded  # type: ignore[assignment]
    if head.endswith("ForQuestionAnswering"):
        model.register_forward_pre_hook(_question_is_global, with_kwargs=True)
    return model


def _unpadded(
    input_ids: Any, attention_mask: Any, token_type_ids: Any, position_ids: Any, inputs_embeds: Any, **_: Any
) -> tuple[Any, ...]:
    return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds


def _question_is_global(model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """Make the tokens before the first separator global, as transformers does."""
    ends = named["input_ids"] == model.config.sep_token_id
    return args, {**named, "global_attention_mask": (ends.cumsum(1) == 0).long()}


def _forward(*, has_global: bool) -> Any:
    def forward(
        self: Any, hidden_states: Tensor, is_index_masked: Tensor, is_index_global_attn: Tensor, **_: Any
    ) -> tuple[Tensor]:
        real, first = ~is_index_masked, is_index_global_attn
        place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        near = (place[:, None] - place[None, :]).abs() <= self.one_sided_attn_window_size
        seen = real[:, None, :] & near
        if has_global:
            seen = seen | first[:, None, :]
        out = _attend(hidden_states, self.query, self.key, self.value, self.num_heads, seen[:, None])
        out = out.masked_fill(is_index_masked[..., None], 0.0)
        if has_global:
            projections = self.query_global, self.key_global, self.value_global
            wide = _attend(hidden_states, *projections, self.num_heads, real[:, None, None, :])
            out = wide.where(first[..., None], out)
        return (out,)

    return forward


def _attend(
    x: Tensor, query: nn.Module, key: nn.Module, value: nn.Module, heads: int, seen: Tensor
) -> Tensor:
    """Attend within x [batch, seq, hidden] where `seen` [batch, 1, seq or 1, seq] is true."""
    q, k, v = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)


FAMILY = Family(patches={"longformer": _use_masked_attention})
