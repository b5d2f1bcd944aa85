"""Attention of a model's own code, routed to `infer::attend_paged` over the paged KV cache of a step.

transformers' AttentionInterface calls the function registered here; modules that bypass it are replaced (see
`patched_attention`), and layers of a state or of latents are routed alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....errors import NotUsableError
from ....kernels.ops.state_space.state_call import StateCall
from ..state_layers import use_state_cache
from .latent_attention import Latent, use_latents
from .patched_attention import replaced_attention

INTERFACE = "infer_paged"
# Arguments of transformers' attention that change nothing here: no dropout, always causal, positions already applied.
_HARMLESS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "cache_position"}
_HARMLESS |= {"logits_to_keep", "output_hidden_states", "return_dict", "position_embeddings"}


class AttentionCall(NamedTuple):
    """Arguments of one attention call, recorded by a step that `records_attention`."""

    query: Tensor  # [1, query heads, tokens, width]
    key: Tensor  # [1, key heads, tokens, width]
    value: Tensor
    mask: Tensor | None
    window: int
    chunk: int
    causal: bool
    refusal: str | None  # why the paged operator can't compute this call

    @property
    def shape(self) -> tuple[int, int, int]:
        """Query heads, key heads, width of keys or values, the larger one."""
        return self.query.shape[1], self.key.shape[1], max(self.key.shape[3], self.value.shape[3])

    def each_token_alone(self) -> Tensor:
        """Stand in for attention without mixing tokens: [1, tokens, query heads, width of values].

        The result depends on query, key and value.
        """
        times = self.query.shape[1] // self.key.shape[1]
        key, value = (x.repeat_interleave(times, 1) for x in (self.key, self.value))
        mixed = value + key.mean(-1, keepdim=True) + self.query.mean(-1, keepdim=True)
        return mixed.transpose(1, 2).contiguous()  # as transformers gives it: some models view it


class StepCall:
    """Tensors of one call of a step, for the attention function."""

    def __init__(self, tensors: Mapping[str, Tensor], page: int, dtype: int, records_attention: bool) -> None:
        self.tensors, self.page, self.dtype, self.records_attention = tensors, page, dtype, records_attention
        self.layers = self.cross_layers = 0  # attention calls so far, and those to a source
        self.source_queries: tuple[Tensor, Tensor] | None = None  # starts and slots of attention to a source
        self.latent: Latent | None = None  # of the layer that is about to attend
        self.seen: list[AttentionCall] = []  # of a call that looks
        self.state = StateCall(
            tensors["positions"], tensors.get("state_cache"), tensors.get("state_segments")
        )


CALL: ContextVar[StepCall] = ContextVar("step")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention function: query [1, Hq, T, D], key, value [1, Hkv, T, D] to [1, T, Hq, D]."""
    call = CALL.get()
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    latent, call.latent = call.latent, None
    if latent is not None:
        query = latent.absorb(query)
    refusal = _refusal(query, key, value, others)
    if query.shape[2] != key.shape[2]:
        raise NotUsableError("attention of this model reads keys other than those of its tokens")
    if not call.records_attention and (refusal or attention_mask is not None):
        raise NotUsableError(refusal or "attention of this model needs attention_mask")
    # Not by the module: the exporter passes short-lived stand-ins, whose ids come again.
    layer, call.layers = call.layers, call.layers + 1
    chunk = _chunk(module)
    if call.records_attention:
        causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = int(sliding_window or 0)
        seen = AttentionCall(query, key, value, attention_mask, window, chunk, bool(causal), refusal)
        call.seen.append(seen)
        alone = seen.each_token_alone()
        return alone if latent is None else latent.expand(alone), None
    named, width = call.tensors, value.shape[-1]
    query, key, value = _of_one_width(query, key, value)
    out = torch.ops.infer.attend_paged(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        *(named[n] for n in ("kv_cache", "slot_mapping", "block_table", "query_start", "seq_lens")),
        *(s_aux, layer, call.page, call.dtype),
        *(scale, int(sliding_window or 0), float(softcap or 0.0)),
        *((slopes, chunk) if chunk else () if slopes is None else (slopes,)),
    )
    out = out[None, ..., :width]
    return out if latent is None else latent.expand(out), None


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad keys or values with zeros to the wider of the two, and queries as keys: a page has room for one width."""
    widest = max(key.shape[-1], value.shape[-1])
    padded = (
        x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value)
    )
    query, key, value = padded
    return query, key, value


def attend_replaced(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """Attend for a replaced attention module: [1, T, Hq, D]."""
    return attend(module, query, key, value, None, **arguments)[0]


def _chunk(module: Any) -> int:
    """Return the tokens of a chunk beyond which this module's layer does not attend, or 0; `probe` checks the mask."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None) or ()
    if index is None or index >= len(types) or types[index] != "chunked_attention":
        return 0
    return int(getattr(config, "attention_chunk_size", 0) or 0)


def _refusal(query: Tensor, key: Tensor, value: Tensor, others: Mapping[str, Any]) -> str | None:
    unknown = {k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS}
    if unknown or others.get("dropout"):
        return f"attention of this model needs {', '.join(sorted(unknown)) or 'dropout'}"
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        return "queries, keys and values of this model do not fit together"
    return None


@contextlib.contextmanager
def use_paged_attention(model: nn.Module) -> Iterator[None]:
    """Route attention and state layers of a transformers model to our operators within the context."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(INTERFACE, attend)
    masks: Any = AttentionMaskInterface
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: getattr(config, "_attn_implementation", None) for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = INTERFACE
    try:
        with (
            replaced_attention(model, attend_replaced) as replaced,
            use_state_cache(model, lambda _: CALL.get().state),
            use_latents(model, lambda latent: setattr(CALL.get(), "latent", latent)),
        ):
            if replaced and INTERFACE not in masks._global_mapping:
                AttentionMaskInterface.register(INTERFACE, _unused_mask)
            yield
    finally:
        if masks._global_mapping.get(INTERFACE) is _unused_mask:
            del masks._global_mapping[INTERFACE]
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _unused_mask(**_: Any) -> Tensor:
    """Build the mask that replaced modules ignore; some models compute with it."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool)
