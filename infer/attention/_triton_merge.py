"""Pieces of attention merged by their largest logit and sum; sinks take part once, here or where there is one piece."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.gpu.launch import launch

_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def with_sink(
    most: tl.tensor, total: tl.tensor, acc: tl.tensor, sink: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a logit without a value to rows: most, total, sink [R], acc [R, D]."""
    sink = sink * _LOG2E
    highest = tl.maximum(most, sink)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    rescale = tl.exp2(most - finite)
    return highest, total * rescale + tl.exp2(sink - finite), acc * rescale[:, None]


@triton.jit(do_not_specialize=["tokens", "splits"])
def _merge(
    piece_ptr: tl.tensor,  # float32 [splits, T, Hq, D]
    most_ptr: tl.tensor,  # float32 [splits, T, Hq]
    sum_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    splits: tl.tensor,
    width: tl.tensor,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    head, heads = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * heads + head
    split = tl.arange(0, SPLITS)
    at = row + split * (tokens.to(tl.int64) * heads)
    most = tl.load(most_ptr + at, mask=split < splits, other=float("-inf"))
    real = most > float("-inf")  # what a piece without keys has in the other two is not defined
    total = tl.load(sum_ptr + at, mask=real, other=0.0)
    highest = tl.max(most, 0)
    if SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * _LOG2E
        highest = tl.maximum(highest, sink)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.where(real, tl.exp2(most - finite), 0.0)
    denominator = tl.sum(total * share, 0)
    if SINKS:
        denominator += tl.exp2(sink - finite)
    column = tl.arange(0, WIDTH)
    pieces = tl.load(
        piece_ptr + at[:, None] * width + column[None],
        mask=real[:, None] & (column < width)[None],
        other=0.0,
    )
    out = tl.sum(pieces * share[:, None], 0) / tl.where(denominator > 0, denominator, 1.0)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=column < width)


def merge(pieces: Tensor, most: Tensor, total: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    """Merge pieces float32 [splits, T, Hq, D], not divided by their sums.

    most (times log2 e) and total are [splits, T, Hq].
    """
    splits, tokens, heads, width = pieces.shape
    launch(
        _merge,
        (tokens, heads),
        pieces,
        most,
        total,
        total if sinks is None else sinks,
        out,
        tokens,
        splits,
        width,
        SPLITS=triton.next_power_of_2(splits),
        WIDTH=triton.next_power_of_2(width),
        SINKS=sinks is not None,
        num_warps=4,
    )
