"""Keys that a tile of queries attends to: its sequence, the range of its piece of the past, and the mask within it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(start_ptr: tl.tensor, tile: tl.tensor, batch: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Return the sequence that a tile belongs to: the last one whose first tile is not after it."""
    found = 0
    for first in range(0, batch, 128):
        b = first + tl.arange(0, 128)
        start = tl.load(start_ptr + b, mask=b < batch, other=0)
        found += tl.sum(((b < batch) & (start // TOKENS + b <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit
def key_range(
    past: tl.tensor,  # tokens of the sequence before the new ones
    begin: tl.tensor,  # first new token of the tile
    count: tl.tensor,  # new tokens of the sequence
    window: tl.tensor,
    chunk: tl.tensor,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    LOCAL: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first key of this program's piece and the one after its last; empty where none is left for it."""
    stop = past + tl.minimum(begin + TOKENS, count)
    low = 0
    if LOCAL:
        low = tl.maximum(past + begin + 1 - window, 0)
    if CHUNKS:
        low = tl.maximum(low, (past + begin) // chunk * chunk)
    each = tl.cdiv(tl.cdiv(stop - low, tl.num_programs(2)), KEYS) * KEYS
    low += tl.program_id(2) * tl.maximum(each, LEAST)
    return low, tl.minimum(stop, low + tl.maximum(each, LEAST))


@triton.jit
def visible(
    j: tl.tensor,
    position: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    LOCAL: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """Return bool [R, KEYS]: queries at `position` [R] see keys j [KEYS] before `stop`."""
    seen = (j < stop)[None] & (j[None] <= position[:, None])
    if LOCAL:
        seen &= j[None] > position[:, None] - window
    if CHUNKS:
        seen &= j[None] >= (position // chunk * chunk)[:, None]
    return seen
