"""Runner of whole sequences over a step, `input_ids` [batch, seq] to `logits` [batch, seq, vocab].

Used to compare with the float original, for golden outputs, by `Predictor.predict`, and to time decode steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec import TensorSpec
from ..lora.layers import INDEX
from .encoder_decoder.source_pages import Source
from .step_shape import StepShape

CONTEXT = 128  # tokens before a decode step that is timed


def full_sequence_outputs(shape: StepShape) -> tuple[TensorSpec, ...]:
    """Return the output specs of a `FullSequenceRunner`."""
    return (TensorSpec("logits", "float32", ("batch", "seq", shape.vocab_size)),)


def attention_inputs(
    shape: StepShape, done: Sequence[int], new: Sequence[int], table: Tensor
) -> dict[str, Tensor]:
    """Build the attention inputs of a step: sequence i has `done[i]` tokens in the cache and gets `new[i]`."""
    rows = [torch.arange(d, d + n) for d, n in zip(done, new, strict=True)]
    places = [table[i, r // shape.page].long() * shape.page + r % shape.page for i, r in enumerate(rows)]
    counts = torch.tensor([0, *new], dtype=torch.int32)
    return {
        "positions": torch.cat(rows),
        "slot_mapping": torch.cat(places),
        "block_table": table,
        "query_start": counts.cumsum(0, dtype=torch.int32),
        "seq_lens": torch.tensor([d + n for d, n in zip(done, new, strict=True)], dtype=torch.int32),
    }


def state_inputs(states: Tensor | None, done: Sequence[int], new: Sequence[int]) -> dict[str, Tensor]:
    """Build the state inputs of a step, {} for a model without state layers (`states` None).

    Sequence i reads and writes row i in place.
    """
    if states is None:
        return {}
    ends = itertools.accumulate(new)
    cuts = [
        (end - count, end, i if before else -1, i)
        for i, (end, count, before) in enumerate(zip(ends, new, done, strict=True))
    ]
    return {"state_cache": states, "state_segments": torch.tensor(cuts, dtype=torch.int64)}


class Room(NamedTuple):
    """Cache of one call, and the inputs of a step of its sequences by their tokens so far and their new ones."""

    cache: Tensor
    inputs: Callable[[Sequence[int], Sequence[int]], dict[str, Tensor]]


class FullSequenceRunner:
    """Runner of `step` on whole sequences, one call at a time; each call uses a cache of its own."""

    ids = "input_ids"  # name of the tokens among the inputs

    def __init__(self, step: Any, shape: StepShape, device: str = "cpu") -> None:
        self.step, self.shape, self.device = step, shape, device
        self.inputs: tuple[TensorSpec, ...] = (TensorSpec(self.ids, "int64", ("batch", "seq")),)
        self.outputs = full_sequence_outputs(shape)
        self._adapters = {} if shape.adapters is None else shape.adapters.none(1, device)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the logits in two steps, so that the second one reads the cache."""
        ids = inputs[self.ids].cpu()
        batch, length = ids.shape
        room = self._room(self._sources_of(inputs), length)
        parts = []
        for start, stop in ((0, length // 2), (length // 2, length)):
            if start == stop:
                continue
            named = room.inputs([start] * batch, [stop - start] * batch)
            count = batch * (stop - start)
            logits = self.call(ids[:, start:stop].flatten(), torch.arange(count), room.cache, named)
            parts.append(logits.unflatten(0, (batch, stop - start)))
        return {"logits": torch.cat(parts, 1)}

    def decoding(self, batch: int, context: int = CONTEXT) -> Callable[[], Any]:
        """Return a call that decodes one token of each of `batch` sequences after `context` tokens.

        A source has `context` tokens too.
        """
        context = min(context, self.shape.max_positions - 1)
        room = self._room([self._source(context)] * batch, context + 1)
        named = room.inputs([context] * batch, [1] * batch)
        ids, rows = torch.ones(batch, dtype=torch.int64), torch.arange(batch)
        return lambda: self.call(ids, rows, room.cache, named)

    def reading(self, tokens: int) -> Callable[[], Any]:
        """Return a call that computes a prompt of `tokens` tokens and the logits of its last one."""
        tokens = min(tokens, self.shape.max_positions)
        room = self._room([self._source(tokens)], tokens)
        named = room.inputs([0], [tokens])
        ids, rows = torch.ones(tokens, dtype=torch.int64), torch.tensor([tokens - 1])
        return lambda: self.call(ids, rows, room.cache, named)

    def _sources_of(self, inputs: Mapping[str, Tensor]) -> list[Source]:
        """Return the source of each sequence of a batch, which is empty for a model without an encoder."""
        return [{}] * len(inputs[self.ids])

    def _source(self, tokens: int) -> Source:
        """Return a source of so many tokens for a call that is timed."""
        return {}

    def _room(self, sources: Sequence[Source], length: int) -> Room:
        """Allocate a cache for a sequence of `length` tokens beside each source."""
        table = self._table(len(sources), length)
        states = self.shape.new_state(len(sources), self.device)
        return Room(
            self.shape.new_cache(table.numel(), self.device),
            lambda done, new: (
                attention_inputs(self.shape, done, new, table) | state_inputs(states, done, new)
            ),
        )

    def _table(self, batch: int, length: int) -> Tensor:
        blocks = max(-(-length // self.shape.page), 1)
        return torch.arange(batch * blocks, dtype=torch.int32).reshape(batch, blocks)

    def call(self, ids: Tensor, rows: Tensor, cache: Tensor, named: Mapping[str, Tensor]) -> Tensor:
        """Run one step and return the logits of `rows`; `named` is what `attention_inputs` and `state_inputs` give."""
        inputs = {"token_ids": ids, "logit_rows": rows, "kv_cache": cache, **named, **self._adapters}
        if self._adapters:
            inputs[INDEX] = torch.zeros_like(ids)
        return self.step.run(inputs)["logits"]

    def close(self) -> None:
        self.step.close()
