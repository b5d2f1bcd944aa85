"""Rows of a state cache: state of a layer besides keys and values, read and written by segments.

The cache is float32 [rows, floats]. A row holds the state of one sequence after one of its tokens, all layers together;
each layer has its own numbers of it, from `offset` on. `segments` int64 [segments, 4] cuts the flat run of tokens:

    first token, end token, row that is read (-1: the state is zero), row that is written (-1: it is not kept)

Segments are computed in order, so that one may read the row that an earlier one wrote: a sequence of two segments
leaves its state at their border behind. A row that is read and not written stays as it is; a segment without tokens
copies. Tokens of no segment give zeros.

    causal_conv      depthwise convolution over the token and those before it
    gated_delta      gated delta rule, of Qwen3-Next and Qwen3.5
    selective_scan   state space model with a decay for each channel and state, of Mamba
    ssd_scan         state space model with one decay for each head, of Mamba2
    linear_scan      h = decay h + x for each channel, of RecurrentGemma

All operands are float32. The functions of these files are the slow twins of the native kernels `infer::*_native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import define_op

STATE_ARGUMENTS = "Tensor(a!) state_cache, Tensor segments, int offset"
STATE_LAYERS: list[str] = []  # operators, each with a native form of the same arguments


class Segment(NamedTuple):
    """Consecutive tokens of one sequence. `state`: before its first token, a copy; `kept`: where it is written."""

    tokens: slice
    state: Tensor
    kept: Tensor | None

    def keep(self, state: Tensor) -> None:
        """Write the state after the last token."""
        if self.kept is not None:
            self.kept.copy_(state)


def each_segment(
    state_cache: Tensor, segments: Tensor, offset: int, shape: tuple[int, ...]
) -> Iterator[Segment]:
    """Yield the segments in order, with one layer's state float32 of `shape`.

    Raises `RuntimeError` for a row that the cache does not have.
    """
    count = torch.Size(shape).numel()
    rows = state_cache.shape[0]
    for first, end, read, written in segments.tolist():
        torch._check(read < rows and written < rows, lambda: f"a row of {rows}")
        place = slice(offset, offset + count)
        state = (
            state_cache[read, place].clone().view(shape)
            if read >= 0
            else torch.zeros(shape, dtype=torch.float32, device=state_cache.device)
        )
        kept = state_cache[written, place].view(shape) if written >= 0 else None
        yield Segment(slice(first, end), state, kept)


def define_state_layer(schema: str, reference: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    """Register `infer::<schema>` and its native form, which takes the same arguments."""
    name, _, arguments = schema.partition("(")
    STATE_LAYERS.append(name)
    define_op.define(f"{schema} -> Tensor", reference, shape)
    define_op.declare(f"{name}_native({arguments} -> Tensor", shape)
