"""Put new keys and values into their slots of the cache: one program for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.gpu.launch import cdiv, launch
from ._args import AttentionArgs
from ._portable import LARGEST_FLOAT8, LEVELS, TINY
from ._triton_elementwise import to_float8

_LEVELS, _LARGEST = tl.constexpr(float(LEVELS)), tl.constexpr(float(LARGEST_FLOAT8))
_TINY = tl.constexpr(TINY)
# Adding and taking away 1.5 * 2**23 rounds a float32 below 2**22 to an integer, halves to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)
_MOST = 4096  # numbers of one program


@triton.jit
def step_of(largest: tl.tensor, cache_ptr: tl.tensor) -> tl.tensor:
    """Return the step of each row whose largest absolute value, in float32, is given."""
    FLOAT8: tl.constexpr = cache_ptr.dtype.element_ty == tl.uint8
    most = tl.zeros_like(largest) + (_LARGEST if FLOAT8 else _LEVELS)
    return tl.maximum(tl.div_rn(largest, most), _TINY)


@triton.jit
def quantized(x: tl.tensor, step: tl.tensor, cache_ptr: tl.tensor, QUANTIZED: tl.constexpr) -> tl.tensor:
    """Return x [R, C] as the cache stores it; step [R] is read where it is QUANTIZED."""
    values = x.to(tl.float32)
    if QUANTIZED:
        FLOAT8: tl.constexpr = cache_ptr.dtype.element_ty == tl.uint8
        ratio = tl.div_rn(values, tl.broadcast_to(step[:, None], values.shape))
        return to_float8(ratio) if FLOAT8 else ((ratio + _ROUNDER) - _ROUNDER).to(tl.int8)
    return values.to(cache_ptr.dtype.element_ty)


@triton.jit
def put(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    step_ptr: tl.tensor,
    head: tl.tensor,
    kept: tl.tensor,
    QUANTIZED: tl.constexpr,
) -> None:
    """Store rows [R, C] of numbers and, QUANTIZED, the step of each row."""
    x = tl.load(source_ptr, mask=kept, other=0.0)
    step = tl.zeros([x.shape[0]], tl.float32)
    if QUANTIZED:
        step = step_of(tl.max(tl.abs(x.to(tl.float32)), 1), target_ptr)
        tl.store(step_ptr, step, mask=head)
    tl.store(target_ptr, quantized(x, step, target_ptr, QUANTIZED), mask=kept)


@triton.jit
def _write(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    cache_ptr: tl.tensor,  # of one layer, in the type of the cache
    step_ptr: tl.tensor,  # the same bytes as float32
    slot_ptr: tl.tensor,
    key_token: tl.tensor,  # strides
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    page_stride: tl.tensor,  # of cache_ptr
    step_stride: tl.tensor,  # of step_ptr
    heads: tl.tensor,
    width: tl.tensor,
    PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    page, place = slot // PAGE, slot % PAGE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    kept = (head < heads)[:, None] & (column < width)[None]
    row = head * PAGE + place
    to = cache_ptr + page * page_stride + row[:, None] * width + column[None]
    steps = step_ptr + page * step_stride + heads * PAGE * width // 2 + row
    key = key_ptr + token * key_token + head[:, None] * key_head + column[None]
    value = value_ptr + token * value_token + head[:, None] * value_head + column[None]
    half = heads * PAGE * width
    put(key, to, steps, head < heads, kept, QUANTIZED)
    put(value, to + half, steps + heads * PAGE, head < heads, kept, QUANTIZED)


def views(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Return the layer's pages as numbers of the cache's type, float8 as bytes, and as float32, both [pages, …]."""
    layer = args.kv_cache[args.layer]
    float8 = args.layout.dtype == "float8_e4m3fn"
    kind = torch.uint8 if float8 else getattr(torch, args.layout.dtype)
    return layer.view(kind), layer.view(torch.float32)


def write(args: AttentionArgs) -> None:
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (args.key, args.value))
    cache, steps = views(args)
    tokens, heads, width = key.shape
    padded = triton.next_power_of_2(width)
    together = min(triton.next_power_of_2(heads), max(_MOST // padded, 1))
    launch(
        _write,
        (tokens, cdiv(heads, together)),
        key,
        value,
        cache,
        steps,
        args.slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        cache.stride(0),
        steps.stride(0),
        heads,
        width,
        PAGE=args.page,
        QUANTIZED=args.layout.is_scaled,
        HEADS=together,
        WIDTH=padded,
        num_warps=4,
    )
