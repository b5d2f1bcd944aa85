"""Attention: ONNX's operator, and those that onnxruntime fuses into the domain com.microsoft."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .operators import MICROSOFT, Node, operator
from .values import Unsupported


def _heads(x: Tensor, count: int) -> Tensor:
    """Cut [batch, time, heads * size] into [batch, heads, time, size]; four dimensions stay."""
    return x if x.dim() == 4 else x.reshape(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


@operator("Attention", since=23)
def attention(
    node: Node,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Attend with an additive or boolean mask, causal or not, grouped heads, a soft cap and a cache."""
    if node.get("softmax_precision") not in (None, 1) and q.dtype != torch.float32:
        raise Unsupported("a softmax precision")
    flat = q.dim() == 3
    q, k, v = _heads(q, node.get("q_num_heads", 0)), *(_heads(x, node.get("kv_num_heads", 0)) for x in (k, v))
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = k, v
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = node.get("scale") or 1 / math.sqrt(int(q.shape[-1]))
    root = math.sqrt(scale)
    raw = torch.matmul(q * root, (k * root).transpose(-1, -2))
    cap = node.get("softcap", 0.0)
    capped = cap * torch.tanh(raw / cap) if cap else raw
    bias = _bias(node, mask, q, k, past_key, lengths)
    seen = capped if bias is None else capped + bias
    weights = torch.softmax(seen, -1)
    if bias is not None:  # a query that sees no key gives 0
        blind = bias.amax(-1, keepdim=True) == -math.inf
        weights = torch.where(blind, torch.zeros_like(weights), weights)
    shown = (raw, capped, seen, weights)[node.get("qk_matmul_output_mode", 0)]
    out = torch.matmul(weights.to(v.dtype), v)
    if flat:
        out = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)
    return out, *present, shown


def _bias(
    node: Node, mask: Tensor | None, q: Tensor, k: Tensor, past: Tensor | None, lengths: Tensor | None
) -> Tensor | None:
    """Return what is added to the logits: the mask, -inf above the diagonal and beyond the lengths."""
    bias: Tensor | None = None
    queries, keys = q.shape[2], k.shape[2]
    if mask is not None:
        bias = _additive(mask, q.dtype)
        if bias.shape[-1] != keys:
            bias = F.pad(bias, (0, keys - bias.shape[-1]), value=-math.inf)
    start: Any = 0 if past is None else past.shape[2]
    if lengths is not None and past is None:
        start = (lengths - queries).reshape(-1, 1, 1, 1)
    ahead = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - start  # of a key before its query
    left, right = node.get("left_window_size", -1), node.get("right_window_size", -1)
    right = 0 if node.get("is_causal", 0) else right
    if right >= 0:
        bias = _plus(bias, _additive(ahead <= right, q.dtype))
    if left >= 0:
        bias = _plus(bias, _additive(ahead >= -left, q.dtype))
    if lengths is not None:
        bias = _plus(bias, _additive(torch.arange(keys) < lengths.reshape(-1, 1, 1, 1), q.dtype))
    return bias


def _plus(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros((), dtype=dtype).masked_fill(~mask, -math.inf)


@operator("RotaryEmbedding", since=23)
def rotary(node: Node, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    return _rotary(node, x, cos, sin, positions)


@operator("RotaryEmbedding", domain=MICROSOFT)
def rotary_microsoft(node: Node, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate; one position alone is that of the first token of every row."""
    time = x.shape[2] if x.dim() == 4 else x.shape[1]
    if node.get("scale", 1.0) != 1.0:
        raise Unsupported("a scale")
    if positions.dim() == 1:
        positions = (positions + torch.arange(time))[None, :].expand(x.shape[0], -1)
    return _rotary(node, x, cos, sin, positions)


def _rotary(node: Node, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    flat = x.dim() == 3
    heads = node.get("num_heads", 0)
    if flat and not heads:
        heads = x.shape[-1] // (2 * cos.shape[-1]) if not node.get("rotary_embedding_dim", 0) else 0
    x = _heads(x, heads)
    size = node.get("rotary_embedding_dim", 0) or x.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    cos, sin = (t if positions is None else t[positions] for t in (cos, sin))  # [batch, time, size / 2]
    cos, sin = (t.unsqueeze(1)[..., : size // 2] for t in (cos, sin))
    if node.get("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        found = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(turned.shape)
    else:
        a, b = turned.chunk(2, -1)
        found = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    found = torch.cat([found, rest], -1)
    return found.transpose(1, 2).reshape(found.shape[0], found.shape[2], -1) if flat else found


def _attend(node: Node, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attend over [batch, heads, time, size]; return [batch, time, heads * size]."""
    scale = node.get("scale") or 1 / math.sqrt(int(q.shape[-1]))
    logits = torch.matmul(q, k.transpose(-1, -2)) * scale
    weights = torch.softmax(logits if bias is None else logits + bias, -1)
    out = torch.matmul(weights, v)
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def _key_bias(node: Node, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return what onnxruntime adds for a mask: lengths [batch], or 0 and 1 for keys [batch, keys] and pairs."""
    if mask is None:
        return None
    low, keys = node.get("mask_filter_value", -10000.0), k.shape[2]
    if mask.dim() == 1:
        seen = torch.arange(keys)[None, :] < mask[:, None]
    elif mask.dim() in (2, 3):
        seen = mask != 0
    else:
        raise Unsupported("a mask of four dimensions")
    seen = seen[:, None, None, :] if seen.dim() == 2 else seen[:, None]
    return torch.zeros((), dtype=q.dtype).masked_fill(~seen, low)


@operator("Attention", domain=MICROSOFT)
def fused_attention(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None, mask: Tensor | None = None,
    past: Tensor | None = None, relative: Tensor | None = None, past_length: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Project to queries, keys and values and attend."""
    if past_length is not None or node.get("do_rotary", 0):
        raise Unsupported("a shared cache or rotation")
    heads, sizes = node.get("num_heads"), node.get("qkv_hidden_sizes")
    packed = torch.matmul(x, weight)
    packed = packed if bias is None else packed + bias
    parts = packed.split(list(sizes), -1) if sizes else packed.chunk(3, -1)
    q, k, v = (_heads(part, heads) for part in parts)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    added = _key_bias(node, mask, q, k)
    if node.get("unidirectional", 0):
        added = _plus(added, _causal(q, k, node.get("mask_filter_value", -10000.0)))
    if relative is not None:
        added = _plus(added, relative)
    return _attend(node, q, k, v, added), torch.stack([k, v])


def _causal(q: Tensor, k: Tensor, low: float) -> Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    seen = columns <= rows + (k.shape[2] - q.shape[2])
    return torch.zeros((), dtype=q.dtype).masked_fill(~seen, low)


@operator("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    node: Node, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
    mask: Tensor | None = None, relative: Tensor | None = None, past_key: Tensor | None = None,
    past_value: Tensor | None = None, *others: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if k is None or v is None or q.dim() != 3 or any(other is not None for other in others):
        raise Unsupported("packed inputs or a shared cache")
    heads = node.get("num_heads")
    if bias is not None:
        size = q.shape[-1]
        q = q + bias[:size]
        if k.dim() == 3:
            k, v = k + bias[size : 2 * size], v + bias[2 * size :]
    q, k, v = (_heads(part, heads) for part in (q, k, v))
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    added = _key_bias(node, mask, q, k)
    if node.get("unidirectional", 0):
        added = _plus(added, _causal(q, k, node.get("mask_filter_value", -10000.0)))
    if relative is not None:
        added = _plus(added, relative)
    return _attend(node, q, k, v, added), k, v


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_norm(
    node: Node, ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor, types: Tensor | None,
    gamma: Tensor, beta: Tensor, mask: Tensor | None = None, place: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Add the embeddings of words, positions and types and normalize; the second output is the length of the mask."""
    total = F.embedding(ids.to(torch.int64), words)
    total = total + (
        positions[: ids.shape[1]] if place is None else F.embedding(place.to(torch.int64), positions)
    )
    if segments is not None and types is not None:
        total = total + F.embedding(segments.to(torch.int64), types)
    found = F.layer_norm(total, total.shape[-1:], gamma, beta, node.get("epsilon", 1e-12))
    count = torch.zeros(ids.shape[0], dtype=torch.int32) if mask is None else mask.sum(1).to(torch.int32)
    return found, count, total
