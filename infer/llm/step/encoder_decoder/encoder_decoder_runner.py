"""Runner of whole sequences over the two graphs of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....spec import DECODER_IDS, TensorSpec
from ..full_sequence_runner import FullSequenceRunner, Room, attention_inputs
from ..step_shape import SourceShape, StepShape
from .encoder_step import example_source, source_of, source_specs
from .source_pages import Source, encode, rows_of_batch, source_inputs, source_length, tensor_names


def whole_inputs(source: SourceShape) -> tuple[TensorSpec, ...]:
    """Return the specs of whole sequences: the source and the tokens of the decoder."""
    batched = (TensorSpec(spec.name, spec.dtype, ("batch", *spec.shape)) for spec in source_specs(source))
    return (*batched, TensorSpec(DECODER_IDS, "int64", ("batch", "seq")))


class SourceSequenceRunner(FullSequenceRunner):
    """Runner of the two graphs on whole sequences, one call at a time; each call encodes its sources anew."""

    ids = DECODER_IDS

    def __init__(self, step: Any, shape: StepShape, device: str = "cpu") -> None:
        super().__init__(step, shape, device)
        self.source = source_of(shape)
        self.inputs = whole_inputs(self.source)

    def reading(self, tokens: int) -> Callable[[], Any]:
        """Return a call that encodes a source of `tokens` tokens and computes the decoder's first step."""
        source, start = self._source(tokens), list(self.source.start_ids)
        room, pages = self._room([source], len(start)), self._pages([source], len(start))[0]
        named = room.inputs([0], [len(start)])
        ids, rows = torch.tensor(start), torch.tensor([len(start) - 1])

        def read() -> Tensor:
            encode(self.step, self.shape, source, pages, room.cache)
            return self.call(ids, rows, room.cache, named)

        return read

    def _sources_of(self, inputs: Mapping[str, Tensor]) -> list[Source]:
        return rows_of_batch(self.source, {name: inputs[name].cpu() for name in tensor_names(self.source)})

    def _source(self, tokens: int) -> Source:
        return example_source(self.source, min(tokens, self.source.max_tokens))

    def _room(self, sources: Sequence[Source], length: int) -> Room:
        table, pages = self._table(len(sources), length), self._pages(sources, length)
        cache = self.shape.new_cache(pages[-1][-1] + 1, self.device)
        held = [
            (own, encode(self.step, self.shape, one, own, cache))
            for one, own in zip(sources, pages, strict=True)
        ]
        return Room(
            cache,
            lambda done, new: attention_inputs(self.shape, done, new, table) | source_inputs(held, new),
        )

    def _pages(self, sources: Sequence[Source], length: int) -> list[list[int]]:
        """Return the pages of sources of one length, behind those of the decoder's tokens."""
        first, page = self._table(len(sources), length).numel(), self.shape.page
        each = -(-source_length(self.source, sources[0]) // page)
        return [list(range(first + i * each, first + (i + 1) * each)) for i in range(len(sources))]


def sequence_runner(step: Any, shape: StepShape, device: str = "cpu") -> FullSequenceRunner:
    """Return the runner of whole sequences over a step of that shape."""
    return (FullSequenceRunner if shape.source is None else SourceSequenceRunner)(step, shape, device)
