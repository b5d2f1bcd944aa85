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

from ....attention import KV_DTYPES
from ....graph import capture
from ....graph.program import ENCODER, TorchGraph
from ....kernels.passes.graph_pass import without_unused
from ....spec import TensorSpec
from ...engine.scheduling.engine_limits import MAX_SEQUENCES, MAX_TOKENS
from ..attention.paged_attention import CALL, StepCall, attend_replaced, use_paged_attention
from ..paged_step import MAX_BLOCKS, MAX_PAGES, capture_step, example
from ..paged_step import inputs as decoder_inputs
from ..step_shape import StepShape
from .cross_attention import use_source_pages
from .encoder_step import capture_encoder, first_position, hidden_size, source_of
from .source_pages import LENGTHS, TABLE


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


def capture_encoder_decoder(model: nn.Module, shape: StepShape) -> TorchGraph:
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
        "source": (1, source.max_tokens or 1),
    }
    samples = example(shape.new_cache(2))
    samples |= {TABLE: torch.zeros((5, 2), dtype=torch.int32), LENGTHS: torch.ones(5, dtype=torch.int32)}
    step = DecoderStep(model, shape.page, shape.kv_dtype).eval()
    with use_paged_decoder(model):
        decoder = capture.capture(
            step, step_inputs(shape), samples, sizes=sizes, outputs=("logits",), task="text-generation"
        )
    program = without_unused(decoder.program)
    return replace(decoder, program=program, parts={ENCODER: capture_encoder(model, shape, sizes)})


def capture_language_model(model: nn.Module, shape: StepShape) -> TorchGraph:
    """Export the step of a causal language model, of an encoder-decoder with the graph of its encoder."""
    return capture_step(model, shape) if shape.source is None else capture_encoder_decoder(model, shape)
