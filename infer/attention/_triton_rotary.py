"""Rotary embedding of queries and keys and the write to the cache, in one launch.

A program takes one token and one key head: it rotates the query heads of that key head, and rotates the key and puts it
into its slot with the value. Numbers are computed in float32, rounded to the type of queries and keys, then to that of
the cache, as `rotated` and the write by itself do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.gpu.launch import launch
from ..kernels.passes.rotary.form import HALVES, INTERLEAVED
from ._args import AttentionArgs, Rotary
from ._triton_write import put, quantized, step_of, views


@triton.jit
def _columns(
    pair: tl.tensor, START: tl.constexpr, ROTATED: tl.constexpr, ADJACENT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the columns of the first and of the second number of each pair."""
    if ADJACENT:
        return START + 2 * pair, START + 2 * pair + 1
    return START + pair, START + pair + ROTATED // 2


@triton.jit
def _other_columns(
    START: tl.constexpr, ROTATED: tl.constexpr, WIDTH: tl.constexpr, OTHERS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the columns [1, OTHERS] that are not rotated, and a mask of those that exist."""
    other = tl.arange(0, OTHERS)[None]
    return tl.where(other < START, other, other + ROTATED), other < WIDTH - ROTATED


@triton.jit
def _load_pair(
    x_ptr: tl.tensor, first: tl.tensor, second: tl.tensor, kept: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Load the numbers at two columns, as float32."""
    a = tl.load(x_ptr + first, mask=kept, other=0.0).to(tl.float32)
    return a, tl.load(x_ptr + second, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _turned(
    a: tl.tensor,  # float32 [R, PAIRS]
    b: tl.tensor,
    cos_first: tl.tensor,  # float32 [1, PAIRS]
    cos_second: tl.tensor,
    sin_first: tl.tensor,
    sin_second: tl.tensor,
    like: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate pairs; return their numbers in the type that `like` points to."""
    kind = like.dtype.element_ty
    return (a * cos_first - b * sin_first).to(kind), (b * cos_second + a * sin_second).to(kind)


@triton.jit
def _rotate_and_write(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cos_ptr: tl.tensor,  # [T, ROTATED], or [T, ROTATED / 2]
    sin_ptr: tl.tensor,
    cache_ptr: tl.tensor,  # of one layer, in the type of the cache
    step_ptr: tl.tensor,  # the same bytes as float32
    slot_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [T, Hq, D]: the rotated queries
    query_token: tl.tensor,  # strides
    query_head: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    cos_token: tl.tensor,
    sin_token: tl.tensor,
    page_stride: tl.tensor,  # of cache_ptr
    step_stride: tl.tensor,  # of step_ptr
    PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key head
    ROWS: tl.constexpr,  # GROUP, up to a power of two
    WIDTH: tl.constexpr,  # numbers of a head
    PADDED: tl.constexpr,  # WIDTH, up to a power of two
    START: tl.constexpr,
    ROTATED: tl.constexpr,
    PAIRS: tl.constexpr,  # ROTATED / 2, up to a power of two
    OTHERS: tl.constexpr,  # columns that are not rotated, up to a power of two, or 0
    ADJACENT: tl.constexpr,  # the two numbers of a pair, in the input
    OUT_ADJACENT: tl.constexpr,  # and in the result
    EACH: tl.constexpr,  # a cosine for each column, not for each pair
) -> None:
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    pair = tl.arange(0, PAIRS)[None]
    some = pair < ROTATED // 2
    first, second = _columns(pair, START, ROTATED, ADJACENT)
    to_first, to_second = _columns(pair, START, ROTATED, OUT_ADJACENT)
    at_first, at_second = (to_first - START, to_second - START) if EACH else (pair, pair)
    cos_first, cos_second = _load_pair(cos_ptr + token * cos_token, at_first, at_second, some)
    sin_first, sin_second = _load_pair(sin_ptr + token * sin_token, at_first, at_second, some)

    row = tl.arange(0, ROWS)[:, None]
    real = row < GROUP
    query = query_ptr + token * query_token + (head * GROUP + row) * query_head
    out = out_ptr + (token * (heads * GROUP) + head * GROUP + row) * WIDTH
    a, b = _load_pair(query, first, second, real & some)
    a, b = _turned(a, b, cos_first, cos_second, sin_first, sin_second, query_ptr)
    tl.store(out + to_first, a, mask=real & some)
    tl.store(out + to_second, b, mask=real & some)
    if OTHERS > 0:
        other, unrotated = _other_columns(START, ROTATED, WIDTH, OTHERS)
        tl.store(out + other, tl.load(query + other, mask=real & unrotated), mask=real & unrotated)

    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    place, half = head * PAGE + slot % PAGE, heads * PAGE * WIDTH
    to = cache_ptr + slot // PAGE * page_stride + place * WIDTH + tl.zeros([1, 1], tl.int32)
    steps = step_ptr + slot // PAGE * step_stride + half // 2 + place + tl.zeros([1], tl.int32)
    column, always = tl.arange(0, PADDED)[None], tl.full([1], True, tl.int1)
    value = value_ptr + token * value_token + head * value_head + column
    put(value, to + half + column, steps + heads * PAGE, always, column < WIDTH, QUANTIZED)
    key = key_ptr + token * key_token + head * key_head + tl.zeros([1, 1], tl.int32)
    a, b = _load_pair(key, first, second, some)
    a, b = _turned(a, b, cos_first, cos_second, sin_first, sin_second, key_ptr)
    step = tl.zeros([1], tl.float32)
    if QUANTIZED:
        largest = tl.max(tl.maximum(tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32))), 1)
        if OTHERS > 0:
            rest = tl.load(key + other, mask=unrotated, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        step = step_of(largest, cache_ptr)
        tl.store(steps, step)
    tl.store(to + to_first, quantized(a, step, cache_ptr, QUANTIZED), mask=some)
    tl.store(to + to_second, quantized(b, step, cache_ptr, QUANTIZED), mask=some)
    if OTHERS > 0:
        rest = tl.load(key + other, mask=unrotated, other=0.0)
        tl.store(to + other, quantized(rest, step, cache_ptr, QUANTIZED), mask=unrotated)


def rotate_and_write(args: AttentionArgs, rotary: Rotary) -> Tensor:
    """Write keys, rotated, and values to their slots; return the rotated queries, dense [T, Hq, D]."""
    query, key, value = (
        x if x.stride(2) == 1 else x.contiguous() for x in (args.query, args.key, args.value)
    )
    cos, sin = (x if x.stride(1) == 1 else x.contiguous() for x in (rotary.cos, rotary.sin))
    cache, steps = views(args)
    tokens, heads, width = query.shape
    kv_heads, form = key.shape[1], rotary.form
    rows, pairs = triton.next_power_of_2(heads // kv_heads), triton.next_power_of_2(form.width // 2)
    out = query.new_empty(query.shape)
    launch(
        _rotate_and_write,
        (tokens, kv_heads),
        *(query, key, value, cos, sin, cache, steps, args.slot_mapping, out),
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        *(cos.stride(0), sin.stride(0), cache.stride(0), steps.stride(0)),
        PAGE=args.page,
        QUANTIZED=args.layout.is_scaled,
        GROUP=heads // kv_heads,
        ROWS=rows,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        START=form.start,
        ROTATED=form.width,
        PAIRS=pairs,
        OTHERS=0 if form.width == width else triton.next_power_of_2(width - form.width),
        ADJACENT=form.order != HALVES,
        OUT_ADJACENT=form.order == INTERLEAVED,
        EACH=cos.shape[1] == form.width,
        num_warps=1 if rows * pairs <= 256 else 4,
    )
    return out
