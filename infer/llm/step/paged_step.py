"""Step of a language model: new tokens of many sequences, concatenated, over a paged KV cache; captured once.

    token_ids, positions, slot_mapping int64 [tokens]   the new tokens, sequence after sequence
    query_start int32 [batch + 1], seq_lens int32 [batch], block_table int32 [batch, blocks]
    logit_rows int64 [rows]                              indices of the tokens whose logits are returned
    kv_cache uint8 [layers, pages, page_bytes]           written in place
    state_cache float32 [rows, floats], state_segments int64 [segments, 4]
                                                         of layers with state, see `infer.kernels.ops.state_cache`
    → logits float32 [rows, vocab]

The same graph serves prefill, chunked prefill, decode and any mixture. The model's own code runs: its attention is
routed by transformers' AttentionInterface to `infer::attend_paged` (see `infer.attention`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attention import KV_DTYPES
from ...errors import NotUsableError
from ...graph import capture
from ...graph.program import Graph
from ...spec import TensorSpec
from ..engine.limits import MAX_SEQUENCES, MAX_TOKENS
from ..lora.layers import INDEX, WEIGHTS, AdapterShape, adapted, adapter_shape
from .eager_attention import replaced_attention
from .latent_attention import Latent, use_latents
from .state_layers import StateCall, use_state_cache
from .step_shape import StepShape

INTERFACE = "infer_paged"
MAX_BLOCKS, MAX_PAGES = 65536, 1 << 24
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
        self.latent: Latent | None = None  # of the layer that is about to attend
        self.seen: list[AttentionCall] = []  # of a call that looks
        self.state = StateCall(
            tensors["positions"], tensors.get("state_cache"), tensors.get("state_segments")
        )


CALL: ContextVar[StepCall] = ContextVar("step")


def _attention(
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
        raise NotUsableError("attention of this model has other keys than those of its tokens")
    if not call.records_attention and (refusal or attention_mask is not None):
        raise NotUsableError(refusal or "attention of this model wants attention_mask")
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
    return _attention(module, query, key, value, None, **arguments)[0]


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
        return f"attention of this model wants {', '.join(sorted(unknown)) or 'dropout'}"
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        return "queries, keys and values of this model do not fit together"
    return None


class Step(nn.Module):
    """Step of `model`, a causal language model of transformers."""

    def __init__(self, model: nn.Module, page: int, kv_dtype: str) -> None:
        super().__init__()
        self.model, self.page, self.dtype = model, page, KV_DTYPES.index(kv_dtype)
        self.records_attention = False  # only see what attention is called with
        self.last: StepCall | None = None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        logit_rows: Tensor,
        kv_cache: Tensor,
        state_cache: Tensor | None = None,
        state_segments: Tensor | None = None,
        adapter_index: Tensor | None = None,
        adapter_weights: Tensor | None = None,
    ) -> Tensor:
        tensors = {
            "positions": positions,
            "slot_mapping": slot_mapping,
            "block_table": block_table,
            "query_start": query_start,
        }
        tensors |= {"seq_lens": seq_lens, "kv_cache": kv_cache}
        if state_cache is not None and state_segments is not None:
            tensors |= {"state_cache": state_cache, "state_segments": state_segments}
        if adapter_index is not None and adapter_weights is not None:
            tensors |= {INDEX: adapter_index, WEIGHTS: adapter_weights}
        self.last = StepCall(tensors, self.page, self.dtype, self.records_attention)
        token = CALL.set(self.last)
        try:
            out = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        finally:
            CALL.reset(token)
        return out.logits[0].float()


@contextlib.contextmanager
def use_paged_attention(model: nn.Module) -> Iterator[None]:
    """Route attention and state layers of a transformers model to our operators within the context."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(INTERFACE, _attention)
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


def example(kv_cache: Tensor) -> dict[str, Tensor]:
    """Return inputs of two sequences of three and two new tokens, the smallest call in which no size is one."""
    return {
        "token_ids": torch.tensor([1, 2, 3, 1, 2]),
        "positions": torch.tensor([0, 1, 2, 0, 1]),
        "slot_mapping": torch.full((5,), -1),
        "block_table": torch.zeros((2, 2), dtype=torch.int32),
        "query_start": torch.tensor([0, 3, 5], dtype=torch.int32),
        "seq_lens": torch.tensor([3, 2], dtype=torch.int32),
        "logit_rows": torch.tensor([2, 4]),
        "kv_cache": kv_cache,
    }


def inputs(shape: StepShape) -> tuple[TensorSpec, ...]:
    """Return the input specs of a step."""
    return (
        TensorSpec("token_ids", "int64", ("tokens",)),
        TensorSpec("positions", "int64", ("tokens",)),
        TensorSpec("slot_mapping", "int64", ("tokens",)),
        TensorSpec("block_table", "int32", ("sequences", "blocks")),
        TensorSpec("query_start", "int32", ("starts",)),
        TensorSpec("seq_lens", "int32", ("sequences",)),
        TensorSpec("logit_rows", "int64", ("rows",)),
        TensorSpec("kv_cache", "uint8", (shape.layers, "pages", shape.page_bytes)),
        *_state_inputs(shape),
        *_adapter_inputs(shape.adapters),
    )


def _state_inputs(shape: StepShape) -> tuple[TensorSpec, ...]:
    if not shape.state_floats:
        return ()
    return (
        TensorSpec("state_cache", "float32", ("state_rows", shape.state_floats)),
        TensorSpec("state_segments", "int64", ("segments", 4)),
    )


def _adapter_inputs(shape: AdapterShape | None) -> tuple[TensorSpec, ...]:
    if shape is None:
        return ()
    return TensorSpec(INDEX, "int64", ("tokens",)), TensorSpec(WEIGHTS, "float32", (shape.size,))


def with_adapters(model: nn.Module, shape: StepShape, slots: int, rank: int) -> StepShape:
    """Return `shape` with room for `slots` adapters of `rank`."""
    step = Step(model, shape.page, shape.kv_dtype)
    step.records_attention = True
    named = example(torch.zeros((0, 0, 0), dtype=torch.uint8))
    with use_paged_attention(model):
        found = adapter_shape(model, lambda: step(**named), len(named["token_ids"]), slots, rank)
    return msgspec.structs.replace(shape, adapters=found)


def capture_step(model: nn.Module, shape: StepShape, *, whole: nn.Module | None = None) -> Graph:
    """Export the step of a causal language model. `whole`: module to export instead of a plain `Step` of it."""
    sizes = {
        "tokens": (1, MAX_TOKENS),
        "sequences": (1, MAX_SEQUENCES),
        "starts": (2, MAX_SEQUENCES + 1),
        "rows": (1, MAX_TOKENS),
        "blocks": (1, MAX_BLOCKS),
        "pages": (1, MAX_PAGES),
        "state_rows": (1, MAX_PAGES),
        "segments": (1, MAX_TOKENS),
    }
    step = whole or Step(model, shape.page, shape.kv_dtype).eval()
    samples = example(shape.new_cache(2))
    if (states := shape.new_state(2)) is not None:
        samples |= {"state_cache": states, "state_segments": torch.tensor([[0, 3, -1, 0], [3, 5, -1, 1]])}
    if shape.adapters is not None:
        samples |= shape.adapters.none(len(samples["token_ids"]))
    with use_paged_attention(model), adapted(model, shape.adapters, lambda: CALL.get().tensors):
        return capture.capture(
            step, inputs(shape), samples, sizes=sizes, outputs=("logits",), task="text-generation"
        )
