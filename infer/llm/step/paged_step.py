"""Step of a language model: new tokens of many sequences, concatenated, over a paged KV cache; captured once.

    token_ids, positions, slot_mapping int64 [tokens]   the new tokens, sequence after sequence
    query_start int32 [batch + 1], seq_lens int32 [batch], block_table int32 [batch, blocks]
    logit_rows int64 [rows]                              indices of the tokens whose logits are returned
    kv_cache uint8 [layers, pages, page_bytes]           written in place
    state_cache float32 [rows, floats], state_segments int64 [segments, 4]
                                                         of layers with state, see `ops.state_space.state_cache`
    → logits float32 [rows, vocab]

The same graph serves prefill, chunked prefill, decode and any mixture. The model's own code runs: its attention is
routed to `infer::attend_paged` (see `paged_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import msgspec
import torch
from torch import Tensor, nn

from ...attention import KV_DTYPES
from ...graph import capture
from ...graph.program import TorchGraph
from ...spec import TensorSpec
from ..engine.scheduling.engine_limits import MAX_SEQUENCES, MAX_TOKENS
from ..lora.layers import INDEX, WEIGHTS, adapted, adapter_shape
from .attention.paged_attention import CALL, StepCall, use_paged_attention
from .encoder_decoder.source_pages import LENGTHS, TABLE
from .step_shape import StepShape

Paged = Callable[[nn.Module], AbstractContextManager[None]]
MAX_BLOCKS, MAX_PAGES = 65536, 1 << 24
SIZES = {
    "tokens": (1, MAX_TOKENS),
    "sequences": (1, MAX_SEQUENCES),
    "starts": (2, MAX_SEQUENCES + 1),
    "rows": (1, MAX_TOKENS),
    "blocks": (1, MAX_BLOCKS),
    "pages": (1, MAX_PAGES),
    "state_rows": (1, MAX_PAGES),
    "segments": (1, MAX_TOKENS),
    "source_blocks": (1, MAX_BLOCKS),
}


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
        source_table: Tensor | None = None,
        source_lens: Tensor | None = None,
    ) -> Tensor:
        given = {
            "positions": positions,
            "slot_mapping": slot_mapping,
            "block_table": block_table,
            "query_start": query_start,
            "seq_lens": seq_lens,
            "logit_rows": logit_rows,
            "kv_cache": kv_cache,
            "state_cache": state_cache,
            "state_segments": state_segments,
            INDEX: adapter_index,
            WEIGHTS: adapter_weights,
            TABLE: source_table,
            LENGTHS: source_lens,
        }
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        self.last = StepCall(tensors, self.page, self.dtype, self.records_attention)
        token = CALL.set(self.last)
        try:
            logits = self.run_model(token_ids, positions, logit_rows)
        finally:
            CALL.reset(token)
        return logits[0].float()

    def run_model(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Call the model as its own code has it; returns logits [1, rows, vocab]."""
        out = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        return out.logits  # type: ignore[no-any-return]


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
    specs = [
        TensorSpec("token_ids", "int64", ("tokens",)),
        TensorSpec("positions", "int64", ("tokens",)),
        TensorSpec("slot_mapping", "int64", ("tokens",)),
        TensorSpec("block_table", "int32", ("sequences", "blocks")),
        TensorSpec("query_start", "int32", ("starts",)),
        TensorSpec("seq_lens", "int32", ("sequences",)),
        TensorSpec("logit_rows", "int64", ("rows",)),
        TensorSpec("kv_cache", "uint8", (shape.layers, "pages", shape.page_bytes)),
    ]
    if shape.state_floats:
        specs.append(TensorSpec("state_cache", "float32", ("state_rows", shape.state_floats)))
        specs.append(TensorSpec("state_segments", "int64", ("segments", 4)))
    if shape.adapters is not None:
        specs.append(TensorSpec(INDEX, "int64", ("tokens",)))
        specs.append(TensorSpec(WEIGHTS, "float32", (shape.adapters.size,)))
    if shape.source is not None:
        specs.append(TensorSpec(TABLE, "int32", ("tokens", "source_blocks")))
        specs.append(TensorSpec(LENGTHS, "int32", ("tokens",)))
    return tuple(specs)


def with_adapters(model: nn.Module, shape: StepShape, slots: int, rank: int) -> StepShape:
    """Return `shape` with room for `slots` adapters of `rank`."""
    step = Step(model, shape.page, shape.kv_dtype)
    step.records_attention = True
    named = example(torch.zeros((0, 0, 0), dtype=torch.uint8))
    with use_paged_attention(model):
        found = adapter_shape(model, lambda: step(**named), len(named["token_ids"]), slots, rank)
    return msgspec.structs.replace(shape, adapters=found)


def capture_step(
    model: nn.Module, shape: StepShape, kind: type[Step] = Step, paged: Paged = use_paged_attention
) -> TorchGraph:
    """Export the step of a language model; `paged` routes its attention to pages within a context."""
    samples = example(shape.new_cache(2))
    if (states := shape.new_state(2)) is not None:
        samples |= {"state_cache": states, "state_segments": torch.tensor([[0, 3, -1, 0], [3, 5, -1, 1]])}
    if shape.adapters is not None:
        samples |= shape.adapters.none(len(samples["token_ids"]))
    if shape.source is not None:
        samples |= {
            TABLE: torch.zeros((5, 2), dtype=torch.int32),
            LENGTHS: torch.ones(5, dtype=torch.int32),
        }
    step = kind(model, shape.page, shape.kv_dtype).eval()
    with paged(model), adapted(model, shape.adapters, lambda: CALL.get().tensors):
        return capture.capture(
            step, inputs(shape), samples, sizes=SIZES, outputs=("logits",), task="text-generation"
        )
