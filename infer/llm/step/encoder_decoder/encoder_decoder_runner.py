"""Runner of whole sequences over the two graphs of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....spec import DECODER_IDS, TensorSpec
from ..full_sequence_runner import CONTEXT, FullSequenceRunner, attention_inputs
from ..step_shape import SourceShape, StepShape
from .encoder_step import source_of, source_specs
from .source_pages import TOKENS, Source, encode, rows_of_batch, source_inputs, source_length, tensor_names


def whole_inputs(source: SourceShape) -> tuple[TensorSpec, ...]:
    """Return the specs of whole sequences: the source and the tokens of the decoder."""
    batched = (TensorSpec(spec.name, spec.dtype, ("batch", *spec.shape)) for spec in source_specs(source))
    return (*batched, TensorSpec(DECODER_IDS, "int64", ("batch", "seq")))


class SourceSequenceRunner(FullSequenceRunner):
    """Runner of the two graphs on whole sequences, one call at a time; each call uses a cache of its own."""

    def __init__(self, step: Any, shape: StepShape, device: str = "cpu") -> None:
        super().__init__(step, shape, device)
        self.source = source_of(shape)
        self.inputs = whole_inputs(self.source)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the logits of the decoder's tokens in two steps, so that the second one reads the cache."""
        ids = inputs[DECODER_IDS].cpu()
        given = rows_of_batch(self.source, {name: inputs[name].cpu() for name in tensor_names(self.source)})
        batch, length = ids.shape
        table, cache, sources = self._rooms(given, length)
        parts = []
        for start, stop in ((0, length // 2), (length // 2, length)):
            if start == stop:
                continue
            new = [stop - start] * batch
            named = attention_inputs(self.shape, [start] * batch, new, table) | source_inputs(sources, new)
            count = batch * (stop - start)
            logits = self.call(ids[:, start:stop].flatten(), torch.arange(count), cache, named)
            parts.append(logits.unflatten(0, (batch, stop - start)))
        return {"logits": torch.cat(parts, 1)}

    def decoding(self, batch: int, context: int = CONTEXT) -> Callable[[], Any]:
        """Return a call that decodes one token of each of `batch` sequences.

        `context`: tokens before it, and of the source.
        """
        context = min(context, self.shape.max_positions - 1)
        given = self._sources(batch, context)
        table, cache, sources = self._rooms(given, context + 1)
        new = [1] * batch
        named = attention_inputs(self.shape, [context] * batch, new, table) | source_inputs(sources, new)
        ids, rows = torch.ones(batch, dtype=torch.int64), torch.arange(batch)
        return lambda: self.call(ids, rows, cache, named)

    def reading(self, tokens: int) -> Callable[[], Any]:
        """Return a call that encodes a source of `tokens` tokens and computes the decoder's first step."""
        given = self._sources(1, tokens)
        start = list(self.source.start_ids)
        table, cache, sources = self._rooms(given, len(start))
        new = [len(start)]
        named = attention_inputs(self.shape, [0], new, table) | source_inputs(sources, new)
        ids, rows, pages = torch.tensor(start), torch.tensor([len(start) - 1]), sources[0][0]

        def read() -> Tensor:
            encode(self.step, self.shape, given[0], pages, cache)
            return self.call(ids, rows, cache, named)

        return read

    def _sources(self, batch: int, tokens: int) -> list[Source]:
        one: dict[str, Tensor] = {}
        if self.source.features:
            one[self.source.name] = torch.zeros(self.source.features)
        if self.source.reads_text:
            one[TOKENS] = torch.ones(min(tokens, self.source.max_tokens), dtype=torch.int64)
        return [one] * batch

    def _rooms(
        self, given: Sequence[Source], length: int
    ) -> tuple[Tensor, Tensor, list[tuple[list[int], int]]]:
        """Allocate a cache, encode the sources, and return the table of the decoder, the cache, and the sources."""
        batch, page = len(given), self.shape.page
        blocks = max(-(-length // page), 1)
        rows = source_length(self.source, given[0])
        each = -(-rows // page)
        table = torch.arange(batch * blocks, dtype=torch.int32).reshape(batch, blocks)
        cache = self.shape.new_cache(batch * (blocks + each), self.device)
        sources = []
        for index in range(batch):
            pages = list(range(batch * blocks + index * each, batch * blocks + (index + 1) * each))
            sources.append((pages, encode(self.step, self.shape, given[index], pages, cache)))
        return table, cache, sources


def sequence_runner(step: Any, shape: StepShape, device: str = "cpu") -> FullSequenceRunner:
    """Return the runner of whole sequences over a step of that shape."""
    return (FullSequenceRunner if shape.source is None else SourceSequenceRunner)(step, shape, device)
