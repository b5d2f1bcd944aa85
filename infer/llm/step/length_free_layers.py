"""Whole sequences through layers that were rewritten for the step, so that a model is captured at any length.

transformers' own code of these layers is bound to the length at capture: it cuts state layers into chunks or goes
through them token by token, and slices tables of positions by sizes that the exporter can't keep symbolic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...attention import alibi, visible
from ...kernels.ops.state_space.state_call import StateCall
from .attention.patched_attention import replaced_attention
from .state_layers import use_state_cache


@contextlib.contextmanager
def use_whole_sequences(model: nn.Module) -> Iterator[None]:
    """Rewrite attention modules and state layers of `model` for calls on whole sequences, within the context."""
    with replaced_attention(model, _attend), use_state_cache(model, _from_zero):
        yield


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slopes: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attend causally in place of a module, [batch, heads, seq, width] each to [batch, seq, heads, width]."""
    length = query.shape[2]
    hidden = ~visible(length, length, int(sliding_window or 0), 0, query.device)
    bias = torch.zeros((), device=query.device).masked_fill(hidden, -torch.inf)
    if slopes is not None:
        bias = bias + alibi(slopes, length)[:, None]
    times = query.shape[1] // key.shape[1]
    key, value = (x if times == 1 else x.repeat_interleave(times, 1) for x in (key, value))
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.to(query.dtype), scale=scaling
    )
    return mixed.transpose(1, 2)


def _from_zero(hidden_states: Tensor) -> StateCall:
    """Return the state of whole sequences [batch, seq, ...]: each begins with zero and keeps nothing."""
    batch, length = hidden_states.shape[:2]
    first = torch.arange(batch, device=hidden_states.device) * length
    nowhere = torch.full_like(first, -1)
    segments = torch.stack([first, first + length, nowhere, nowhere], 1)
    positions = torch.arange(length, device=hidden_states.device).repeat(batch)
    return StateCall(positions, torch.zeros((0, 0), device=hidden_states.device), segments)
