"""Encoder-decoder language models as two graphs over one paged KV cache.

The encoder reads one source and writes the keys and values that the decoder's cross-attention will read:

    input_ids int64 [source], of sound input_features float32 [bands, frames], of images pixel_values float32 [C, H, W]
    slot_mapping int64 [slots]                          of its pages, one slot for each row of the encoder's output
    kv_cache uint8 [layers, pages, page_bytes]          written in place
    → encoder_output float32 [slots, hidden]

The step of the decoder is that of `paged_step` with two inputs more:

    source_table int32 [tokens, source_blocks], source_lens int32 [tokens]   pages and length of each token's source
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....attention import KV_DTYPES
from ....graph import capture
from ....graph.program import Graph
from ....kernels.passes.graph_pass import without_unused
from ....spec import TensorSpec
from ...engine.scheduling.engine_limits import MAX_SEQUENCES, MAX_TOKENS
from ..attention.paged_attention import CALL, StepCall, attend_replaced, use_paged_attention
from ..paged_step import MAX_BLOCKS, MAX_PAGES, capture_step, example
from ..paged_step import inputs as decoder_inputs
from ..step_shape import SourceShape, StepShape
from .cross_attention import cross_attentions, use_source_pages
from .source_pages import LENGTHS, TABLE

HIDDEN = "encoder_output"
PIXELS = "pixel_values"


class DecoderStep(nn.Module):
    """Step of the decoder of `model`, an encoder-decoder of transformers."""

    def __init__(self, model: nn.Module, page: int, kv_dtype: str) -> None:
        super().__init__()
        self.model, self.page, self.dtype = model, page, KV_DTYPES.index(kv_dtype)

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
        source_table: Tensor,
        source_lens: Tensor,
    ) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        tensors = {
            "positions": positions,
            "slot_mapping": slot_mapping,
            "block_table": block_table,
            "query_start": query_start,
            "seq_lens": seq_lens,
            "kv_cache": kv_cache,
            "logit_rows": logit_rows,
            TABLE: source_table,
            LENGTHS: source_lens,
        }
        unread = torch.zeros((1, 1, hidden_size(self.model)), device=kv_cache.device)
        first = first_position(self.model)
        own = {} if first is None else {"decoder_position_ids": positions[None] + first}
        token = CALL.set(StepCall(tensors, self.page, self.dtype, records_attention=False))
        try:
            out = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=unread),
                decoder_input_ids=token_ids[None],
                use_cache=False,
                **own,
            )
        finally:
            CALL.reset(token)
        return out.logits[0].float()


def _read_source(query: Tensor, scale: float) -> Tensor:
    """Attend to the source: queries [1, heads, tokens, width] → [1, tokens, heads, width]."""
    call = CALL.get()
    named, count = call.tensors, query.shape[2]
    layer, call.cross_layers = call.cross_layers, call.cross_layers + 1
    given = query[0].transpose(0, 1)
    if call.source_queries is None:  # equal in all layers
        starts = torch.arange(count + 1, dtype=torch.int32, device=query.device)
        call.source_queries = starts, torch.full_like(named["slot_mapping"], -1)
    starts, unkept = call.source_queries
    out = torch.ops.infer.attend_paged(
        *(given, given, given, named["kv_cache"], unkept, named[TABLE], starts, named[LENGTHS]),
        *(None, layer, call.page, call.dtype, scale, 0, 0.0),
    )
    return out[None]


class EncoderStep(nn.Module):
    """Encoder of `model`: reads one source and writes its keys and values for every layer of the decoder."""

    def __init__(self, model: nn.Module, page: int, kv_dtype: str) -> None:
        super().__init__()
        self.model, self.page, self.dtype = model, page, KV_DTYPES.index(kv_dtype)

    def forward(
        self,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> Tensor:
        given = {"input_ids": input_ids, "input_features": input_features, "pixel_values": pixel_values}
        hidden = encoded(self.model, **{k: v[None] for k, v in given.items() if v is not None})
        # One sequence without a query: keys and values are written, nothing is read.
        table, starts = slot_mapping.new_zeros((1, 1)).int(), slot_mapping.new_zeros(2).int()
        lengths = slot_mapping.new_ones(1).int()
        for layer, cross in enumerate(cross_attentions(self.model)):
            key, value = (cross.project(which, hidden)[0] for which in ("key", "value"))
            torch.ops.infer.attend_paged(
                *(key, key, value, kv_cache, slot_mapping, table, starts, lengths),
                *(None, layer, self.page, self.dtype, 1.0, 0, 0.0),
            )
        return hidden[0].float()


def encoded(model: Any, **source: Tensor) -> Tensor:
    """Return what the decoder's cross-attention reads of sources, float [rows, length, width]."""
    hidden: Tensor = model.get_encoder()(**source).last_hidden_state
    projection = getattr(model, "enc_to_dec_proj", None)  # of an encoder of another width
    return hidden if projection is None else projection(hidden)


def hidden_size(model: Any) -> int:
    """Return the width of the encoder's output."""
    config = model.get_encoder().config if model.main_input_name == PIXELS else model.config
    return int(getattr(config, "d_model", 0) or config.hidden_size)


def first_position(model: Any) -> int | None:
    """Return the place of position 0 in the table of a model of images whose decoder takes positions, else None.

    RoBERTa and its relatives begin behind the padding's row.
    """
    decoder = model.get_decoder()
    if model.main_input_name != PIXELS or "position_ids" not in inspect.signature(decoder.forward).parameters:
        return None
    tables = (m for name, m in decoder.named_modules() if name.endswith("position_embeddings"))
    padding = next((getattr(table, "padding_idx", None) for table in tables), None)
    return 0 if padding is None else int(padding) + 1


@contextlib.contextmanager
def use_paged_decoder(model: nn.Module) -> Iterator[None]:
    """Route attention of the decoder of `model`, to its own tokens and to the source, to the paged operator."""
    pages = use_source_pages(
        model,
        _read_source,
        attend_replaced,
        lambda: CALL.get().tensors["positions"],
        lambda: CALL.get().tensors["logit_rows"],
    )
    with use_paged_attention(model), pages:
        yield


def step_inputs(shape: StepShape) -> tuple[TensorSpec, ...]:
    """Return the input specs of the decoder's step."""
    return (
        *decoder_inputs(shape),
        TensorSpec(TABLE, "int32", ("tokens", "source_blocks")),
        TensorSpec(LENGTHS, "int32", ("tokens",)),
    )


def encoder_inputs(shape: StepShape) -> tuple[TensorSpec, ...]:
    """Return the input specs of the encoder's graph."""
    source = source_of(shape)
    length: tuple[int | str, ...] = tuple(source.features) or ("source",)
    slots = source.max_length if source.features else "source"
    return (
        TensorSpec("kv_cache", "uint8", (shape.layers, "pages", shape.page_bytes)),
        TensorSpec("slot_mapping", "int64", (slots,)),
        TensorSpec(source.name, source.dtype, length),
    )


def source_of(shape: StepShape) -> SourceShape:
    """Return the sizes of the source; the shape must be that of an encoder-decoder."""
    if shape.source is None:
        raise ValueError("the shape is not that of an encoder-decoder")
    return shape.source


def example_source(source: SourceShape) -> Tensor:
    """Return a small source: three tokens, or silence."""
    return torch.zeros(source.features) if source.features else torch.tensor([1, 2, 3])


def capture_encoder_decoder(model: nn.Module, shape: StepShape) -> Graph:
    """Export both graphs of an encoder-decoder; that of the encoder is `encoder` of the step."""
    source = source_of(shape)
    sizes = {
        "tokens": (1, MAX_TOKENS),
        "sequences": (1, MAX_SEQUENCES),
        "starts": (2, MAX_SEQUENCES + 1),
        "rows": (1, MAX_TOKENS),
        "blocks": (1, MAX_BLOCKS),
        "pages": (1, MAX_PAGES),
        "source_blocks": (1, MAX_BLOCKS),
        "source": (1, source.max_length),
    }
    samples = example(shape.new_cache(2))
    samples |= {TABLE: torch.zeros((5, 2), dtype=torch.int32), LENGTHS: torch.ones(5, dtype=torch.int32)}
    step = DecoderStep(model, shape.page, shape.kv_dtype).eval()
    with use_paged_decoder(model):
        decoder = capture.capture(
            step, step_inputs(shape), samples, sizes=sizes, outputs=("logits",), task="text-generation"
        )
    program = without_unused(decoder.exported)
    return replace(decoder, program=program, encoder=_capture_encoder(model, shape, sizes))


def _capture_encoder(model: nn.Module, shape: StepShape, sizes: Mapping[str, tuple[int, int]]) -> Graph:
    source = source_of(shape)
    sample = example_source(source)
    slots = source.max_length if source.features else len(sample)
    samples = {
        "kv_cache": shape.new_cache(2),
        "slot_mapping": torch.full((slots,), -1),
        source.name: sample,
    }
    step = EncoderStep(model, shape.page, shape.kv_dtype).eval()
    graph = capture.capture(
        step, encoder_inputs(shape), samples, sizes=sizes, outputs=(HIDDEN,), task="encoder"
    )
    return replace(graph, program=without_unused(graph.exported))


def capture_language_model(model: nn.Module, shape: StepShape) -> Graph:
    """Export the step of a causal language model, of an encoder-decoder with the graph of its encoder."""
    return capture_step(model, shape) if shape.source is None else capture_encoder_decoder(model, shape)
