"""Sources of an encoder-decoder: encoded when a sequence starts, read by each step from pages of their own.

A source's pages belong to the sequences of its request; they are released with them. A preempted sequence gives them
up, and its source is encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..step.encoder_decoder.source_pages import TOKENS, Source, encode, source_inputs

if TYPE_CHECKING:
    from ..step.step_shape import SourceShape, StepShape
    from .requests import Request
    from .sequence import ScheduledSequence
    from .step_runner import StepRunner


def source_tensors(source: SourceShape, request: Request) -> Source:
    """Return the source of a request: token ids int64 [source], features as float32; zeros for empty ones."""
    found: dict[str, Tensor] = {}
    if source.features:
        found[source.name] = (
            torch.frombuffer(bytearray(request.features), dtype=torch.float32).view(source.features)
            if request.features
            else torch.zeros(source.features)
        )
    if source.reads_text:
        found[TOKENS] = torch.tensor(request.prompt)
    return found


class SourceEncoder:
    """Runs the encoder of `step`, a runner of both graphs, on sources and builds the inputs about them."""

    def __init__(self, step: StepRunner, shape: StepShape, source: SourceShape, cache: Tensor) -> None:
        self._step, self._shape, self._source, self._cache = step, shape, source, cache

    def encode(self, work: Many[ScheduledSequence]) -> int:
        """Encode the sources of those sequences whose pages do not hold them yet; returns the rows computed."""
        rows = 0
        for sequence, _ in work:
            if sequence.source_ready:
                continue
            given = source_tensors(self._source, sequence.state.request)
            rows += encode(self._step, self._shape, given, sequence.source_pages, self._cache)
            sequence.source_ready = True
        return rows

    def inputs(self, work: Many[ScheduledSequence]) -> dict[str, Tensor]:
        """Return pages and length of the source of each token of a step."""
        sources = [(sequence.source_pages, sequence.state.source_rows) for sequence, _ in work]
        return source_inputs(sources, [count for _, count in work])
