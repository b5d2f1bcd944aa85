"""Attention with a mask in plain operators, in which a query that sees no key gets zeros, as in torch.

torch's exporter writes the lowest finite number where a boolean mask is false, so such a query gets the mean of all
values; where a float mask is -inf it gets NaN, which the next layer spreads over all tokens. Queries of padding see
nothing where attention is local (ModernBERT), and behind a mask that is both causal and of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import traceback

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def has_masks(program: ExportedProgram) -> bool:
    """Return True if an attention of the program has a mask."""
    return any(
        node.target is ATTENTION and _mask(node.args, node.kwargs) is not None for node in program.graph.nodes
    )


def _mask(args: Any, named: Any) -> Any:
    return args[3] if len(args) > 3 else named.get("attn_mask")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with a mask, bool or float; leaves it alone without one.

    query [..., T, D], key [..., S, D], value [..., S, E], mask [..., T, S] → [..., T, E].
    """
    if attn_mask is None or dropout_p or is_causal:
        return NotImplemented
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    factor = query.shape[-1] ** -0.25 if scale is None else scale**0.5
    scores = (query * factor) @ (key * factor).transpose(-2, -1)
    if attn_mask.dtype == torch.bool:
        hidden = attn_mask.logical_not()
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    else:
        hidden = attn_mask == -torch.inf
        scores = scores + attn_mask
    out = scores.softmax(-1).masked_fill(hidden, 0.0) @ value
    return out.transpose(1, 2).contiguous().transpose(1, 2) if _heads_are_columns() else out


def _heads_are_columns() -> bool:
    """Return True if the captured output lies as [batch, T, heads, E], as torch's fused kernels write it.

    The program may view it so; `_fused_sdp_choice` does not tell, since it says MATH for every fake tensor.
    """
    captured = traceback.get_current_meta().get("val")
    return captured is not None and captured.dim() == 4 and captured.stride(2) != captured.shape[3]
