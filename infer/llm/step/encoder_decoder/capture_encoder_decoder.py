"""Encoder-decoder language models as two graphs over one paged KV cache.

`encoder_step` holds the encoder, which reads one source and writes the keys and values that the decoder's
cross-attention will read.

The step of the decoder is that of `paged_step` with two inputs more:

    source_table int32 [tokens, source_blocks], source_lens int32 [tokens]   pages and length of each token's source
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ....graph.program import ENCODER, TorchGraph
from ....kernels.passes.graph_pass import without_unused
from ..attention.paged_attention import CALL, attend_replaced, use_paged_attention
from ..paged_step import Step, capture_step
from ..step_shape import StepShape
from .cross_attention import use_source_pages
from .encoder_step import capture_encoder, first_position, hidden_size
from .source_pages import LENGTHS, TABLE


class DecoderStep(Step):
    """Step of the decoder of `model`, an encoder-decoder of transformers."""

    def run_model(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        unread = torch.zeros((1, 1, hidden_size(self.model)), device=token_ids.device)
        first = first_position(self.model)
        own = {} if first is None else {"decoder_position_ids": positions[None] + first}
        out = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=unread),
            decoder_input_ids=token_ids[None],
            use_cache=False,
            **own,
        )
        return out.logits  # type: ignore[no-any-return]


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


def capture_encoder_decoder(model: nn.Module, shape: StepShape) -> TorchGraph:
    """Export both graphs of an encoder-decoder; that of the encoder is a part of the step."""
    decoder = capture_step(model, shape, DecoderStep, use_paged_decoder)
    program = without_unused(decoder.program)
    return replace(decoder, program=program, parts={ENCODER: capture_encoder(model, shape)})


def capture_language_model(model: nn.Module, shape: StepShape) -> TorchGraph:
    """Export the step of a causal language model, of an encoder-decoder with the graph of its encoder."""
    return capture_step(model, shape) if shape.source is None else capture_encoder_decoder(model, shape)
