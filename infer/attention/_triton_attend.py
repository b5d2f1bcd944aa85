"""Tiles of queries over pieces of their past.

The rows of a tile are the query heads of one key head, of a few tokens of one sequence; sequences share no tile. Tile
number `query_start[b] // tokens + b` is the first of sequence b: that is known without counting, and leaves some tiles
without work. The last program of a tile merges the pieces. Logits are kept times log2(e), so that exponentials are
powers of two.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.gpu.int8.int8_gemv import INTERPRETED
from ..kernels.gpu.launch import launch, tickets
from ._args import AttentionArgs, Tiling
from ._triton_elementwise import alibi, in_type_of, logits
from ._triton_merge import merged, online_softmax, store_normalized, store_piece
from ._triton_ranges import key_range, sequence_of, visible
from ._triton_write import views

LOG2E = math.log2(math.e)
_LOG2E = tl.constexpr(LOG2E)


@triton.jit(do_not_specialize=["batch", "blocks", "tokens"])
def _attend(
    query_ptr: tl.tensor,
    cache_ptr: tl.tensor,  # of one layer, in the type of the cache
    step_ptr: tl.tensor,  # the same bytes as float32
    table_ptr: tl.tensor,
    start_ptr: tl.tensor,
    length_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    piece_ptr: tl.tensor,  # float32 [splits, T, Hq, D], unnormalized outputs of the pieces
    most_ptr: tl.tensor,  # float32 [splits, T, Hq]
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [T, Hq, D]
    ticket_ptr: tl.tensor,  # int32, 0 for each tile and key head
    query_token: tl.tensor,  # strides
    query_head: tl.tensor,
    page_stride: tl.tensor,  # of cache_ptr
    step_stride: tl.tensor,  # of step_ptr
    batch: tl.tensor,
    blocks: tl.tensor,
    tokens: tl.tensor,  # T
    width: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # there is one piece: it is the result
    LOCAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIBI: tl.constexpr,
    ROUNDED: tl.constexpr,  # ALiBi in bfloat16
    ASSEMBLY: tl.constexpr,
) -> None:
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    sequence = sequence_of(start_ptr, tl.program_id(0), batch, TOKENS)
    first = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - first
    begin = (tl.program_id(0) - first // TOKENS - sequence) * TOKENS
    if begin >= count:
        return
    past = tl.load(length_ptr + sequence) - count
    row = tl.arange(0, ROWS)
    token, head = begin + row // GROUP, kv_head * GROUP + row % GROUP
    real = (token < count) & (row < TOKENS * GROUP)
    column = tl.arange(0, WIDTH)
    filled = column < width
    from_query = (first + token).to(tl.int64) * query_token + head * query_head
    kept = real[:, None] & filled[None]
    query = tl.load(query_ptr + from_query[:, None] + column[None], mask=kept, other=0.0)
    position = past + token
    if ALIBI:
        slope = tl.load(slope_ptr + head, mask=real, other=0.0)

    low, stop = key_range(past, begin, count, window, chunk, TOKENS, KEYS, LEAST, LOCAL, CHUNKS)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    half = kv_heads * PAGE * width
    for start in range(low, stop, KEYS):
        j = start + tl.arange(0, KEYS)
        inside = j < stop
        page = tl.load(table_ptr + sequence.to(tl.int64) * blocks + j // PAGE, mask=inside, other=0)
        page, place = page.to(tl.int64), kv_head * PAGE + j % PAGE
        at = cache_ptr + (page * page_stride + place * width)[:, None] + column[None]
        taken = inside[:, None] & filled[None]
        key = in_type_of(query_ptr, tl.load(at, mask=taken, other=0), True, ASSEMBLY)
        value = in_type_of(query_ptr, tl.load(at + half, mask=taken, other=0), False, ASSEMBLY)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        steps = step_ptr + page * step_stride + half // 2 + place
        if QUANTIZED:
            scores *= tl.load(steps, mask=inside, other=0.0)[None]
        seen = visible(j, position, stop, window, chunk, LOCAL, CHUNKS)
        scores = logits(scores, scale, cap, SOFTCAP)
        if ALIBI:
            scores += alibi(slope, j, position, ROUNDED) * _LOG2E
        scores = tl.where(seen, scores, float("-inf"))
        most, total, acc, weight = online_softmax(most, total, acc, scores)
        if QUANTIZED:  # steps relative to the largest, so that float16 weights do not vanish
            value_step = tl.load(steps + kv_heads * PAGE, mask=inside, other=0.0)
            largest = tl.maximum(tl.max(value_step, 0), 1e-30)
            weight *= (value_step / largest)[None]
            acc += tl.dot(weight.to(value.dtype), value, input_precision="ieee") * largest
        else:
            acc += tl.dot(weight.to(value.dtype), value, input_precision="ieee")

    to = (first + token).to(tl.int64) * (kv_heads * GROUP) + head
    out_at = out_ptr + to[:, None] * width + column[None]
    if WHOLE:
        store_normalized(out_at, most, total, acc, sink_ptr + head, kept, SINKS)
    else:
        piece = tokens.to(tl.int64) * (kv_heads * GROUP)
        at = piece_ptr + to[:, None] * width + column[None]
        store_piece(most_ptr + to, sum_ptr + to, at, most, total, acc, piece, width, low < stop, real, kept)
        ticket_ptr += tl.program_id(0) * kv_heads + kv_head
        splits = tl.num_programs(2)
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == splits - 1:
            most, total, acc = merged(most_ptr + to, sum_ptr + to, at, piece, width, splits, real, kept)
            store_normalized(out_at, most, total, acc, sink_ptr + head, kept, SINKS)
            tl.store(ticket_ptr, 0)


def attend_tiles(args: AttentionArgs, tile: Tiling, splits: int, least: int) -> Tensor:
    """Return the output [T, Hq, D]; keys and values of the new tokens are in the cache already."""
    query = args.query if args.query.stride(2) == 1 else args.query.contiguous()
    cache, steps = views(args)
    tokens, heads, width = query.shape
    batch, blocks = args.block_table.shape
    out = query.new_empty(query.shape)
    grid = (tokens // tile.tokens + batch, args.layout.kv_heads)
    counted = tickets(query, grid[0] * grid[1]) if splits > 1 else None
    splits = 1 if counted is None else splits
    whole = splits == 1
    pieces = out if whole else query.new_empty((splits, *query.shape), dtype=torch.float32)
    most, total = (query.new_empty((splits, tokens, heads), dtype=torch.float32) for _ in range(2))
    scale, cap = args.scale * LOG2E, 0.0
    if args.softcap:
        scale, cap = 2 * scale / args.softcap, args.softcap * LOG2E
    launch(
        _attend,
        (*grid, splits),
        query,
        cache,
        steps,
        args.block_table,
        args.query_start,
        args.seq_lens,
        args.seq_lens if args.sinks is None else args.sinks,
        args.seq_lens if args.slopes is None else args.slopes.float(),
        pieces,
        most,
        total,
        out,
        args.seq_lens if counted is None else counted,
        *query.stride()[:2],
        cache.stride(0),
        steps.stride(0),
        batch,
        blocks,
        tokens,
        width,
        args.window,
        args.chunk,
        scale,
        cap,
        PAGE=args.page,
        GROUP=heads // args.layout.kv_heads,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        KEYS=tile.keys,
        WIDTH=triton.next_power_of_2(width),
        LEAST=least,
        WHOLE=whole,
        LOCAL=args.window > 0,
        SOFTCAP=args.softcap > 0,
        SINKS=args.sinks is not None,
        QUANTIZED=args.layout.is_scaled,
        CHUNKS=args.chunk > 0,
        ALIBI=args.slopes is not None,
        ROUNDED=args.slopes is not None and args.slopes.dtype == torch.bfloat16,
        ASSEMBLY=not INTERPRETED,
        num_warps=tile.warps,
        num_stages=3 if tile.rows <= 32 else 2,  # larger tiles fill shared memory with two
    )
    return out
