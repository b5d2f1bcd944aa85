"""Attention modules of transformers that have code of their own, replaced within a step by calls of the paged operator.

Models made before transformers' attention interface compute their attention themselves. `replaced_attention` gives such
a module, found by the name of its class, another method for the time of a step: projections and positions stay the
module's own code, what mixes tokens becomes one call. Each is compared with the model's own forward by `probe` and by
`require_float_step`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....errors import NotUsableError

Attend = Callable[..., Tensor]  # (module, query, key, value, **arguments) → [1, tokens, query heads, width]
Replacement = Callable[..., Any]


def _split_heads(fused: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Split [1, T, heads * parts * D] into `parts` tensors [1, heads, T, D]."""
    named = fused.unflatten(-1, (heads, parts, -1))
    return tuple(part.transpose(1, 2) for part in named.unbind(-2))


def _inner(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """Replace `_attn` of GPT-J and CodeGen: [1, heads, T, D] each, positions applied."""
    return attend(module, query, key, value, scaling=1 / float(module.scale_attn)).transpose(1, 2), None


def _gpt_neo(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """Replace `_attn` of GPT-Neo: logits are not scaled; local layers have a sliding window."""
    window = int(module.config.window_size) if module.attention_type == "local" else None
    return attend(module, query, key, value, scaling=1.0, sliding_window=window).transpose(1, 2), None


def _gpt_neox_japanese(
    attend: Attend, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """Replace `_attn` of GPT-NeoX-Japanese."""
    scale = float(torch.as_tensor(module.norm_factor))
    return attend(module, query, key, value, scaling=1 / scale).transpose(1, 2), None


def _bloom(attend: Attend, module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> Any:
    """Replace the forward of BloomAttention; ALiBi is computed by the operator."""
    query, key, value = _split_heads(module.query_key_value(hidden_states), module.num_heads, 3)
    slopes = alibi_slopes(module.num_heads).to(hidden_states.device)
    mixed = attend(module, query, key, value, scaling=module.inv_norm_factor, slopes=slopes)
    return residual + module.dense(mixed.flatten(2)), None


def _mpt(attend: Attend, module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Replace the forward of MptAttention."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = [x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in mixed.chunk(3, dim=2)]
    # transformers does not read attn_config.alibi: the bias is always added.
    slopes = _mpt_slopes(module.n_heads).to(hidden_states.device)
    out = attend(module, *heads, scaling=module.softmax_scale, slopes=slopes)
    return module.out_proj(out.flatten(2)), None


def _mpt_slopes(heads: int) -> Tensor:
    """Return MPT's slopes, float32 [heads]: those of the next power of two, every second one first."""
    whole = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    return torch.tensor(slopes if whole == heads else [*slopes[1::2], *slopes[::2]][:heads])


def _falcon(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **__: Any,
) -> Any:
    """Replace the forward of FalconAttention, which repeats the keys and values of a group for each of its queries."""
    fused, heads = module.query_key_value(hidden_states), module.num_heads
    if module.new_decoder_architecture:
        groups = module.num_kv_heads
        named = fused.unflatten(-1, (groups, heads // groups + 2, -1))
        query, key, value = named[..., :-2, :].flatten(2, 3), named[..., -2, :], named[..., -1, :]
    else:
        query, key, value = module._split_heads(fused)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    slopes = None
    if alibi is None:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        cos, sin = position_embeddings or (None, None)
        query, key = rotate(query, key, cos, sin)
    else:
        slopes = _falcon_slopes(module).to(hidden_states.device)
    out = attend(module, query, key, value, scaling=module.head_dim**-0.5, slopes=slopes)
    return module.dense(out.flatten(2)), None


def _falcon_slopes(module: Any) -> Tensor:
    """Return the slopes of Falcon, bfloat16: it rounds slope times position to that, and scales the bias as well."""
    if math.log2(module.head_dim) % 2:
        raise NotUsableError(
            f"the ALiBi bias of this model is rounded before it is divided by the square root of {module.head_dim}, "
            "which is no power of two: the operator would round it otherwise"
        )
    return (alibi_slopes(module.num_heads) * module.head_dim**-0.5).bfloat16()


def _doge(
    attend: Attend,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Any:
    """Replace the forward of DogeAttention, whose dynamic mask adds a number made of its value to each key's logits.

    That number is one more column of the keys, which the queries meet with the inverse of the scale. The context ends
    where transformers would drop the keys with the smallest numbers, see `infer.load.model_patches.dynamic_rope`.
    """
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim))
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    added = torch.exp(module.A * functional.softplus(module.dt_proj(value.flatten(2))))
    query, key, value = (x.transpose(1, 2) for x in (module.q_norm(query), module.k_norm(key), value))
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    inverse = torch.full_like(query[..., :1], 1 / module.scaling)
    query = functional.pad(torch.cat([query, inverse], -1), (0, 7))  # kernels take multiples of 8
    key = functional.pad(torch.cat([key, added.transpose(1, 2)[..., None].to(key.dtype)], -1), (0, 7))
    mixed = attend(module, query, key, value, scaling=module.scaling)
    return module.o_proj(mixed.flatten(2)), None


def _xglm(attend: Attend, module: Any, hidden_states: Tensor, *_: Any, **given: Any) -> Any:
    """Replace the forward of XGLMAttention and TrOCRAttention."""
    if given.get("key_value_states") is not None:
        raise NotUsableError("attention of this model reads keys other than those of its tokens")
    projections = (module.q_proj, module.k_proj, module.v_proj)
    heads = [p(hidden_states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for p in projections]
    return module.out_proj(attend(module, *heads, scaling=module.scaling).flatten(2)), None


def _blip(attend: Attend, module: Any, hidden_states: Tensor, *_: Any, **given: Any) -> Any:
    """Replace the forward of BlipTextSelfAttention, whose output another module projects."""
    if given.get("encoder_hidden_states") is not None:
        raise NotUsableError("attention of this model has other keys than those of its tokens")
    projections = (module.query, module.key, module.value)
    heads = [
        p(hidden_states).unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2) for p in projections
    ]
    return attend(module, *heads, scaling=module.attention_head_size**-0.5).flatten(2), None


def _xglm_positions(attend: Attend, module: Any, position_ids: Tensor, *_: Any) -> Tensor:
    """Replace the forward of XGLMSinusoidalPositionalEmbedding, whose table grows with the tokens of a call."""
    found: Tensor = module.weights.index_select(0, position_ids.flatten() + module.offset)
    return found.unflatten(0, position_ids.shape)


# Class of an attention module → the method that is replaced, and by which function.
REPLACEMENTS: dict[str, tuple[str, Replacement]] = {
    "BlipTextSelfAttention": ("forward", _blip),
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _inner),
    "DogeAttention": ("forward", _doge),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _inner),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _gpt_neox_japanese),
    "MptAttention": ("forward", _mpt),
    "TrOCRAttention": ("forward", _xglm),
    "XGLMAttention": ("forward", _xglm),
    "XGLMSinusoidalPositionalEmbedding": ("forward", _xglm_positions),
}

# Parts of a path to attention of the same classes that is not causal: to the output of an encoder, or in one.
NOT_CAUSAL = {"encoder_attn", "crossattention", "text_encoder"}


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of each head, float32 [heads] (Press et al., Train Short, Test Long, 2022)."""
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * (heads - whole), 2)]
    return torch.tensor(slopes)


@contextlib.contextmanager
def replaced_attention(model: nn.Module, attend: Attend) -> Iterator[bool]:
    """Replace the attention modules of `model` that are known within the context; yield True where there are any."""
    found: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        name, function = REPLACEMENTS.get(type(module).__name__, ("", None))
        is_ours = not type(module).__module__.startswith("transformers.")
        if function is None or is_ours or NOT_CAUSAL & set(path.split(".")):
            continue
        setattr(module, name, MethodType(_bound(function, attend), module))
        found.append((module, name))
    try:
        yield bool(found)
    finally:
        for module, name in found:
            delattr(module, name)


def _bound(function: Replacement, attend: Attend) -> Callable[..., Any]:
    return lambda module, *args, **kwargs: function(attend, module, *args, **kwargs)
