"""Encoder of an encoder-decoder as one graph, which writes the keys and values that the decoder's layers will read.

input_ids int64 [source], of sound input_features float32 [bands, frames], of images pixel_values float32 [C, H, W],
some models of images take input_ids as well
slot_mapping int64 [slots]                          of its pages, one slot for each row of the encoder's output
prefix_slots int64 [prefix]                         of the rows of an image that stand before those of input_ids
kv_cache uint8 [layers, pages, page_bytes]          written in place
→ encoder_output float32 [rows, hidden]
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....attention import KV_DTYPES
from ....graph import capture
from ....graph.program import TorchGraph
from ....kernels.passes.graph_pass import without_unused
from ....spec import TensorSpec
from ..paged_step import SIZES
from ..step_shape import SourceShape, StepShape
from .cross_attention import cross_attentions
from .source_pages import PREFIX_SLOTS, TOKENS

HIDDEN = "encoder_output"
PIXELS = "pixel_values"


class EncoderStep(nn.Module):
    """Encoder of `model`: reads one source and writes its keys and values for every layer of the decoder."""

    def __init__(self, model: nn.Module, page: int, kv_dtype: str) -> None:
        super().__init__()
        self.model, self.page, self.dtype = model, page, KV_DTYPES.index(kv_dtype)

    def forward(
        self,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        prefix_slots: Tensor | None = None,
        input_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> Tensor:
        given = {"input_ids": input_ids, "input_features": input_features, "pixel_values": pixel_values}
        hidden = encoded(self.model, **{k: v[None] for k, v in given.items() if v is not None})
        slots = slot_mapping if prefix_slots is None else torch.cat([prefix_slots, slot_mapping])
        # One sequence without a query: keys and values are written, nothing is read.
        table, starts = slots.new_zeros((1, 1)).int(), slots.new_zeros(2).int()
        lengths = slots.new_ones(1).int()
        for layer, cross in enumerate(cross_attentions(self.model)):
            key, value = (cross.project(which, hidden)[0] for which in ("key", "value"))
            torch.ops.infer.attend_paged(
                *(key, key, value, kv_cache, slots, table, starts, lengths),
                *(None, layer, self.page, self.dtype, 1.0, 0, 0.0),
            )
        return hidden[0].float()


def encoded(model: Any, **source: Tensor) -> Tensor:
    """Return what the decoder's cross-attention reads of sources, float [rows, length, width]."""
    encode = getattr(model, "encode_source", None) or model.get_encoder()
    hidden: Tensor = encode(**source).last_hidden_state
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


def source_of(shape: StepShape) -> SourceShape:
    """Return the sizes of the source; the shape must be that of an encoder-decoder."""
    if shape.source is None:
        raise ValueError("the shape is not that of an encoder-decoder")
    return shape.source


def source_specs(source: SourceShape) -> tuple[TensorSpec, ...]:
    """Return the specs of one source, without a batch."""
    features = (TensorSpec(source.name, "float32", source.features),) if source.features else ()
    return (*features, TensorSpec(TOKENS, "int64", ("source",))) if source.reads_text else features


def encoder_inputs(shape: StepShape) -> tuple[TensorSpec, ...]:
    """Return the input specs of the encoder's graph."""
    source = source_of(shape)
    prefix = (TensorSpec(PREFIX_SLOTS, "int64", (source.prefix_rows,)),) if source.prefix_rows else ()
    return (
        TensorSpec("kv_cache", "uint8", (shape.layers, "pages", shape.page_bytes)),
        TensorSpec("slot_mapping", "int64", ("source" if source.reads_text else source.max_length,)),
        *prefix,
        *source_specs(source),
    )


def example_source(source: SourceShape, tokens: int = 3) -> dict[str, Tensor]:
    """Return a source of that many tokens, of silence or a black image."""
    found = {source.name: torch.zeros(source.features)} if source.features else {}
    ids = 1 + torch.arange(tokens) % max(source.vocab_size - 1, 1)
    return found | ({TOKENS: ids} if source.reads_text else {})


def capture_encoder(model: nn.Module, shape: StepShape) -> TorchGraph:
    """Export the encoder with the weights that it reads."""
    source = source_of(shape)
    sizes = {**SIZES, "source": (1, source.max_tokens or 1)}
    given = example_source(source)
    rows = source.rows(len(given.get(TOKENS, ())))
    samples = {"kv_cache": shape.new_cache(2), "slot_mapping": torch.full((rows - source.prefix_rows,), -1)}
    if source.prefix_rows:
        samples[PREFIX_SLOTS] = torch.full((source.prefix_rows,), -1)
    step = EncoderStep(model, shape.page, shape.kv_dtype).eval()
    graph = capture.capture(
        step, encoder_inputs(shape), samples | given, sizes=sizes, outputs=(HIDDEN,), task="encoder"
    )
    return replace(graph, program=without_unused(graph.program))
