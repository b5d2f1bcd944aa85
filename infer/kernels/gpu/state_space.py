"""Layers over a state cache on a GPU: causal convolution, gated delta rule, Mamba, Mamba2 and linear recurrence.

Every number of a state depends on its own head and column only, so a program has some columns of one head and goes
through the tokens of its segments. Segments that read or overwrite what an earlier one wrote are done one after the
other by one program, all others side by side; which they are is found on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch, same_device

_BLOCK = 128  # channels of a program that keeps one number for each
_COLUMNS = 32  # of a program that keeps a matrix


def runs(segments: Tensor, num_rows: int) -> Tensor:
    """Group segments that depend on each other: int64 [S], segment s begins a run of segments s to runs[s] (s: none).

    Raises RuntimeError, on CUDA by an assertion of the device, for a row that the cache does not have.
    """
    torch._assert_async((segments[:, 2:] < num_rows).all())
    index = torch.arange(len(segments), device=segments.device)
    read, written = segments[:, 2], segments[:, 3]
    kept = (written >= 0)[None]
    touches = kept & ((written[None] == read[:, None]) | (written[None] == written[:, None]))
    overwrites = (written >= 0)[:, None] & (read[None] == written[:, None])
    depends = (touches | overwrites) & (index[None] < index[:, None])  # [s, earlier]
    first = ~depends.any(1)
    run = first.cumsum(0)
    apart = (depends & (run[None] != run[:, None])).any()  # a run would wait for another: all in one
    first = torch.where(apart, index == 0, first)
    run = torch.where(apart, torch.ones_like(run), run)
    return torch.where(first, torch.searchsorted(run, run, right=True), index)


@triton.jit
def _convolve(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, cache_ptr: tl.tensor, segments_ptr: tl.tensor,
    runs_ptr: tl.tensor, out_ptr: tl.tensor, channels: tl.tensor, stride: tl.tensor, offset: tl.tensor,
    K: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    bias = tl.load(bias_ptr + c, mask=mask, other=0.0) if BIAS else tl.zeros([BLOCK], tl.float32)
    for s in range(tl.program_id(1), tl.load(runs_ptr + tl.program_id(1)).to(tl.int32)):
        first, end = tl.load(segments_ptr + 4 * s), tl.load(segments_ptr + 4 * s + 1)
        read, written = tl.load(segments_ptr + 4 * s + 2), tl.load(segments_ptr + 4 * s + 3)
        before = cache_ptr + read * stride + offset + c
        after = cache_ptr + written * stride + offset + c
        for i in range(0, (end - first).to(tl.int32)):
            total = bias
            for k in tl.static_range(K):
                at = c * 0 + i + k - (K - 1)
                old = tl.load(
                    before + (i + k) * channels, mask=mask & (at < 0) & (c * 0 + read >= 0), other=0.0
                )
                new = tl.load(x_ptr + (first + at) * channels + c, mask=mask & (at >= 0), other=0.0)
                total += (old + new) * tl.load(weight_ptr + c * K + k, mask=mask, other=0.0)
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            tl.store(out_ptr + (first + i) * channels + c, total, mask=mask)
        for k in tl.static_range(K - 1):  # ascending: what is read lies at or behind what is written
            at = c * 0 + end - first + k - (K - 1)
            old = tl.load(
                before + (end - first + k) * channels, mask=mask & (at < 0) & (c * 0 + read >= 0), other=0.0
            )
            new = tl.load(x_ptr + (first + at) * channels + c, mask=mask & (at >= 0), other=0.0)
            tl.store(after + k * channels, old + new, mask=mask & (c * 0 + written >= 0))
        tl.debug_barrier()


@triton.jit
def _scan(
    decay_ptr: tl.tensor, x_ptr: tl.tensor, cache_ptr: tl.tensor, segments_ptr: tl.tensor, runs_ptr: tl.tensor,
    out_ptr: tl.tensor, channels: tl.tensor, stride: tl.tensor, offset: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < channels
    for s in range(tl.program_id(1), tl.load(runs_ptr + tl.program_id(1)).to(tl.int32)):
        first, end = tl.load(segments_ptr + 4 * s), tl.load(segments_ptr + 4 * s + 1)
        read, written = tl.load(segments_ptr + 4 * s + 2), tl.load(segments_ptr + 4 * s + 3)
        state = tl.load(cache_ptr + read * stride + offset + c, mask=mask & (c * 0 + read >= 0), other=0.0)
        for i in range(0, (end - first).to(tl.int32)):
            at = (first + i) * channels + c
            state = tl.load(decay_ptr + at, mask=mask) * state + tl.load(x_ptr + at, mask=mask)
            tl.store(out_ptr + at, state, mask=mask)
        tl.store(cache_ptr + written * stride + offset + c, state, mask=mask & (c * 0 + written >= 0))
        tl.debug_barrier()


@triton.jit
def _matrix(
    x_ptr: tl.tensor,  # [T, H, P]: values
    step_ptr: tl.tensor,  # [T, H] (beta of DELTA); of CHANNELS [T, H * P]
    a_ptr: tl.tensor,  # [H]; of DELTA decay [T, H]; of CHANNELS [N, P]
    b_ptr: tl.tensor,  # [T, G, N]: keys
    c_ptr: tl.tensor,  # [T, G, N]: queries
    cache_ptr: tl.tensor, segments_ptr: tl.tensor, runs_ptr: tl.tensor, out_ptr: tl.tensor,
    heads: tl.tensor, groups: tl.tensor, rows: tl.tensor, columns: tl.tensor, stride: tl.tensor, offset: tl.tensor,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(2)
    n, p = tl.arange(0, BN), tl.program_id(0) * BP + tl.arange(0, BP)
    inside = p < columns
    mask = (n < rows)[:, None] & inside[None]
    own = head * rows * columns + n[:, None] * columns + p[None] + offset
    group = p // (columns // groups) if CHANNELS else (head // (heads // groups)) + p * 0
    for s in range(tl.program_id(1), tl.load(runs_ptr + tl.program_id(1)).to(tl.int32)):
        first, end = tl.load(segments_ptr + 4 * s), tl.load(segments_ptr + 4 * s + 1)
        read, written = tl.load(segments_ptr + 4 * s + 2), tl.load(segments_ptr + 4 * s + 3)
        state = tl.load(cache_ptr + read * stride + own, mask=mask & (p * 0 + read >= 0)[None], other=0.0)
        for i in range(0, (end - first).to(tl.int32)):
            t = first + i
            at = (t * heads + head) * columns + p
            which = (t * groups + group[None]) * rows + n[:, None]
            b, c = tl.load(b_ptr + which, mask=mask, other=0.0), tl.load(c_ptr + which, mask=mask, other=0.0)
            x = tl.load(x_ptr + at, mask=inside, other=0.0)
            if CHANNELS:
                step = tl.load(step_ptr + at, mask=inside, other=0.0)
                a = tl.load(a_ptr + n[:, None] * columns + p[None], mask=mask, other=0.0)
                state = tl.exp(step[None] * a) * state + b * (step * x)[None]
            elif DELTA:
                state *= tl.exp(tl.load(a_ptr + t * heads + head))
                seen = tl.sum(state * b, 0)
                state += b * (tl.load(step_ptr + t * heads + head) * (x - seen))[None]
            else:
                step = tl.load(step_ptr + t * heads + head)
                state = tl.exp(step * tl.load(a_ptr + head)) * state + b * (step * x)[None]
            tl.store(out_ptr + at, tl.sum(state * c, 0), mask=inside)
        tl.store(cache_ptr + written * stride + own, state, mask=mask & (p * 0 + written >= 0)[None])
        tl.debug_barrier()


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state_cache: Tensor, segments: Tensor, offset: int, silu: bool
) -> Tensor:  # fmt: skip
    """`infer::causal_conv` on CUDA tensors."""
    same_device(x, weight, bias, state_cache, segments)
    channels, width = weight.shape
    tail, out = _tail(state_cache, segments), torch.zeros_like(x)
    launch(
        _convolve, (cdiv(channels, _BLOCK), len(segments)), x.contiguous(), weight.contiguous(),
        weight if bias is None else bias.contiguous(), *tail, out, channels, state_cache.stride(0), offset,
        K=width, BIAS=bias is not None, SILU=silu, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def linear_scan(decay: Tensor, x: Tensor, state_cache: Tensor, segments: Tensor, offset: int) -> Tensor:
    """`infer::linear_scan` on CUDA tensors."""
    same_device(x, decay, state_cache, segments)
    channels, out = x.shape[1], torch.zeros_like(x)
    launch(
        _scan, (cdiv(channels, _BLOCK), len(segments)), decay.contiguous(), x.contiguous(),
        *_tail(state_cache, segments), out, channels, state_cache.stride(0), offset, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
    state_cache: Tensor, segments: Tensor, offset: int,
) -> Tensor:  # fmt: skip
    """`infer::gated_delta` on CUDA tensors."""
    return _matrices(value, beta, decay, key, query, state_cache, segments, offset, delta=True)


def ssd_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state_cache: Tensor,
    segments: Tensor,
    offset: int,
) -> Tensor:
    """`infer::ssd_scan` on CUDA tensors."""
    return _matrices(x, step, a, b, c, state_cache, segments, offset)


def selective_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state_cache: Tensor,
    segments: Tensor,
    offset: int,
) -> Tensor:
    """`infer::selective_scan` on CUDA tensors: one head whose columns have decays of their own."""
    return _matrices(x[:, None], step, a, b, c, state_cache, segments, offset, channels=True)[:, 0]


def _matrices(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state_cache: Tensor, segments: Tensor, offset: int,
    *, delta: bool = False, channels: bool = False,
) -> Tensor:  # fmt: skip
    same_device(x, step, a, b, c, state_cache, segments)
    (_, heads, columns), (_, groups, rows) = x.shape, b.shape
    out = torch.zeros_like(x)
    launch(
        _matrix, (cdiv(columns, _COLUMNS), len(segments), heads), x.contiguous(), step.contiguous(), a.contiguous(),
        b.contiguous(), c.contiguous(), *_tail(state_cache, segments), out, heads, groups, rows, columns,
        state_cache.stride(0), offset, DELTA=delta, CHANNELS=channels, BN=triton.next_power_of_2(rows),
        BP=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def _tail(state_cache: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if state_cache.dim() != 2 or state_cache.stride(1) != 1:
        raise ValueError(f"expected a cache of whole rows, got strides {state_cache.stride()}")
    return state_cache, segments.contiguous(), runs(segments, state_cache.shape[0])
