"""Pieces of attention merged by their largest logit and sum; sinks take part once, here or where there is one piece."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def online_softmax(
    most: tl.tensor, total: tl.tensor, acc: tl.tensor, scores: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return most, total [R] and acc [R, D] relative to the largest logit so far, and weights [R, KEYS] of new scores.

    `total` includes the new weights; `acc` gets their values from the caller. Milakov and Gimelshein, 2018.
    """
    highest = tl.maximum(most, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(scores - finite[:, None])
    rescale = tl.exp2(most - finite)
    return highest, total * rescale + tl.sum(weight, 1), acc * rescale[:, None], weight


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


@triton.jit
def store_normalized(
    out_ptr: tl.tensor,  # [R, D]
    most: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    sink_ptr: tl.tensor,  # of each row [R]
    kept: tl.tensor,
    SINKS: tl.constexpr,
) -> None:
    """Store acc [R, D] over the sum of its weights, the sink's included; 0 for rows that saw no key."""
    if SINKS:
        most, total, acc = with_sink(most, total, acc, tl.load(sink_ptr).to(tl.float32))
    acc /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def store_piece(
    most_ptr: tl.tensor,  # of each row [R], of the first piece
    sum_ptr: tl.tensor,
    acc_ptr: tl.tensor,  # [R, D]
    most: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    piece: tl.tensor,  # rows of one piece: from a piece to the next
    width: tl.tensor,
    some: tl.tensor,  # the piece has keys
    real: tl.tensor,
    kept: tl.tensor,
) -> None:
    """Store this program's piece, for `merged`; all of it is written when this returns."""
    at = tl.program_id(2) * piece
    tl.store(most_ptr + at, most, mask=real)
    if some:  # nothing else of a piece without keys is read
        tl.store(sum_ptr + at, total, mask=real)
        tl.store(acc_ptr + at * width, acc, mask=kept)
    tl.debug_barrier()


@triton.jit
def merged(
    most_ptr: tl.tensor,  # of each row [R], of the first piece
    sum_ptr: tl.tensor,
    acc_ptr: tl.tensor,  # [R, D]
    piece: tl.tensor,  # rows of one piece: from a piece to the next
    width: tl.tensor,
    splits: tl.tensor,
    real: tl.tensor,
    kept: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return most [R], total [R] and acc [R, D] of all pieces, added in their order.

    Nothing but `most` is defined of a piece without keys. Other programs wrote them: no first-level cache is asked.
    """
    most = tl.full(real.shape, float("-inf"), tl.float32)
    total = tl.zeros(real.shape, tl.float32)
    acc = tl.zeros(kept.shape, tl.float32)
    for split in range(splits):
        at = split * piece
        own = tl.load(most_ptr + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        some = own > float("-inf")
        own_total = tl.load(sum_ptr + at, mask=some, other=0.0, cache_modifier=".cg")
        own_acc = tl.load(acc_ptr + at * width, mask=kept & some[:, None], other=0.0, cache_modifier=".cg")
        highest = tl.maximum(most, own)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        before, share = tl.exp2(most - finite), tl.exp2(own - finite)
        total = total * before + own_total * share
        acc = acc * before[:, None] + own_acc * share[:, None]
        most = highest
    return most, total, acc
