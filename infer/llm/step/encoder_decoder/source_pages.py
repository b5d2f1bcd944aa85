"""Pages of the sources of an encoder-decoder: their slots, and the inputs of a step about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..step_shape import SourceShape, StepShape

TABLE, LENGTHS = "source_table", "source_lens"  # inputs of the decoder's step
TOKENS, PREFIX_SLOTS = "input_ids", "prefix_slots"  # inputs of the encoder's graph
Source = Mapping[str, Tensor]  # one source: a tensor for each input of the encoder, without a batch


def tensor_names(source: SourceShape) -> tuple[str, ...]:
    """Return the names of a source's tensors."""
    return (source.name, TOKENS) if source.features and source.reads_text else (source.name,)


def rows_of_batch(source: SourceShape, batch: Mapping[str, Tensor]) -> list[Source]:
    """Return the sources of a batch, whose tensors have the batch first."""
    names = tensor_names(source)
    return [{name: batch[name][index] for name in names} for index in range(len(batch[source.name]))]


def source_length(source: SourceShape, given: Source) -> int:
    """Return the rows of the encoder's output for one source."""
    return source.rows(len(given[TOKENS]) if source.reads_text else 0)


def source_slots(pages: Sequence[int], length: int, page: int) -> Tensor:
    """Return the slots of a source's rows, int64 [length]."""
    places = torch.arange(length)
    return torch.tensor(pages)[places // page] * page + places % page


def encode(step: Any, shape: StepShape, given: Source, pages: Sequence[int], cache: Tensor) -> int:
    """Run the encoder on one source, whose keys and values go to `pages`; returns its rows.

    `step` is a runner of both graphs, see `graph.encoder_decoder_graphs`.
    """
    source = shape.source
    if source is None:
        raise ValueError("the shape is not that of an encoder-decoder")
    length = source_length(source, given)
    slots = source_slots(pages, length, shape.page)
    named = {**given, "slot_mapping": slots[source.prefix_rows :], "kv_cache": cache}
    if source.prefix_rows:
        named[PREFIX_SLOTS] = slots[: source.prefix_rows]
    step.run(named)
    return length


def source_inputs(sources: Sequence[tuple[Sequence[int], int]], new: Sequence[int]) -> dict[str, Tensor]:
    """Build the inputs of the step about sources: (pages, rows) of each sequence, and how many tokens it gets."""
    table = np.zeros((len(sources), max(len(pages) for pages, _ in sources)), dtype=np.int32)
    for row, (pages, _) in zip(table, sources, strict=True):
        row[: len(pages)] = pages
    lengths = np.array([rows for _, rows in sources], dtype=np.int32)
    if max(new) > 1:
        table, lengths = table.repeat(new, 0), lengths.repeat(new)
    return {TABLE: torch.from_numpy(table), LENGTHS: torch.from_numpy(lengths)}
