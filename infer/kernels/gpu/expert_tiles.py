"""Tiles of a grouped product: places (a row of x and one of its experts) sorted by expert, cut into tiles of one each.

How many tiles an expert has stays on the device: the grid has room for the most that the sizes allow, and a program
without a tile ends at once. So nothing waits for the GPU, and a call can be part of a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, processors

_BN, _NARROW = 64, 32  # output columns of a program; the second where programs are few
_HEIGHTS = (16, 64)  # rows of a tile: the fewest that tensor cores take, and the most


class Tiles(NamedTuple):
    """Places [P] sorted by expert, and of each tile its expert (-1: none), first of `order` and rows [T]; all int64."""

    order: Tensor
    expert: Tensor
    begin: Tensor
    rows: Tensor
    height: int


def tiles_of(expert: Tensor, num_experts: int, height: int) -> Tiles:
    """Sort `expert` int64 [P] into tiles of at most `height` places of one expert."""
    places = expert.numel()
    chosen, order = torch.sort(expert, stable=True)
    starts = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=expert.device))
    blocks = (starts.diff() + height - 1) // height
    ends = blocks.cumsum(0)
    room = torch.arange(min(places, places // height + num_experts), device=expert.device)
    owner = torch.searchsorted(ends, room, right=True)
    known = owner.clamp(max=num_experts - 1)
    begin = starts[known] + (room - ends[known] + blocks[known]) * height
    rows = (starts[known + 1] - begin).clamp(max=height)
    return Tiles(order, torch.where(owner < num_experts, owner, -1), begin, rows, height)


def in_range(x: Tensor, expert: Tensor, num_experts: int, top_k: int) -> None:
    """Raise ValueError unless x [R, K] has R * top_k experts; assert on the device that each exists."""
    if expert.numel() != x.shape[0] * top_k:
        raise ValueError(f"expected {x.shape[0] * top_k} experts for {x.shape[0]} rows, got {expert.numel()}")
    torch._assert_async(((expert >= 0) & (expert < num_experts)).all())


def placed(
    x: Tensor, expert: Tensor, num_experts: int, features: int, top_k: int
) -> tuple[Tiles, int, tuple[int, int]]:
    """Return tiles, output columns of a program and the grid of [R * top_k] places."""
    in_range(x, expert, num_experts, top_k)
    few, most = _HEIGHTS
    height = few
    while height < (most if x.dtype != torch.float32 else 32) and height * num_experts < expert.numel():
        height *= 2
    tiles = tiles_of(expert, num_experts, height)
    count = tiles.expert.numel()
    block = _BN if cdiv(features, _BN) * count >= 2 * processors(x.device) else _NARROW
    return tiles, block, (cdiv(features, block), count)


@triton.jit
def load_places(
    order_ptr: tl.tensor, begin_ptr: tl.tensor, rows_ptr: tl.tensor, BM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the places [BM] of this program's tile, the second axis of the grid, and a mask of those that exist."""
    m = tl.arange(0, BM)
    kept = m < tl.load(rows_ptr + tl.program_id(1))
    return tl.load(order_ptr + tl.load(begin_ptr + tl.program_id(1)) + m, mask=kept, other=0), kept


@triton.jit
def store_places(
    out_ptr: tl.tensor,  # [P, N]
    y: tl.tensor,  # [BN, BM]
    n: tl.tensor,
    num_out: tl.tensor,
    place: tl.tensor,
    kept: tl.tensor,
) -> None:
    """Store the outputs n [BN] of the places of a tile."""
    at = place[None] * num_out + n[:, None]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=(n < num_out)[:, None] & kept[None])
