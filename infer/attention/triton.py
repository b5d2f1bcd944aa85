"""Flash-decoding and prefill on NVIDIA GPUs over the portable page layout, in Triton.

Two launches: new keys and values go to their slots, keys and queries rotated where the operator says so; tiles of
queries attend to pieces of their past, which the last program of a tile merges. Grids and scratch depend on shapes
alone; lengths are read on the device. So nothing waits for the GPU, and a CUDA graph of a step is good for any lengths
that its block table can hold.

Prompts are computed here too, of any length: `torch.nn.attention.varlen` reads pages of [token, head, width] in 16
bits, where these are [head, token, width] or int8; SDPA needs the keys gathered and the lengths on the host. What this
file refuses is computed by `sdpa`.

(Dao et al., Flash-Decoding for long-context inference, 2023.) Compilers keep `infer::attend_paged` whole, as they keep
every operator whose number of rows is symbolic: the best tile is known when it runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import gpu
from ._args import AttentionArgs, Rotary, Tiling

PRIORITY = 30
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256  # numbers of a head: more do not fit into the registers of a tile
LEAST = 256  # tokens of a piece of the past, at least: below that merging costs more than it saves
MOST_SPLITS = 64


def missing() -> str | None:
    return gpu.why_not()


def refuses(args: AttentionArgs) -> str | None:
    if args.query.device.type != "cuda":
        return f"the tensors are on {args.query.device.type}"
    if args.query.dtype not in FLOATS:
        return f"queries are {args.query.dtype}"
    if args.layout.head_dim > WIDEST:
        return f"heads of {args.layout.head_dim} numbers; at most {WIDEST}"
    if args.slopes is not None and args.slopes.dim() > 1:
        return "it has no bias by distance"
    return "the bytes of a page are not a multiple of 4" if args.kv_cache.shape[2] % 4 else None


def tiling(args: AttentionArgs) -> Tiling:
    """Choose tile sizes from shapes alone: rows per sequence on average, between one tensor-core tile and 128."""
    count, heads, width = args.query.shape
    group = heads // args.key.shape[1]
    padded = _power_above(width)
    wide = args.query.dtype == torch.float32  # no tensor cores: larger tiles would leave the registers
    most = 16 if wide else 128 if padded <= 128 else 64
    mean = -(-count // max(len(args.seq_lens), 1))
    rows = max(min(_power_above(mean * group), most), 16, _power_above(group))
    size = getattr(torch, args.layout.dtype).itemsize
    keys = min(max(16384 // (padded * max(size, 2)), 16), 32 if wide else 64)
    return Tiling(rows, rows // group, keys, 8 if rows >= 128 else 4)


def splits_of(args: AttentionArgs, tile: Tiling, processors: int) -> int:
    """Return the number of pieces of the past: two programs for each multiprocessor; fixed in a CUDA graph."""
    batch, blocks = args.block_table.shape
    tiles = (args.query.shape[0] + batch * (tile.tokens - 1)) // tile.tokens  # at most so many have work
    reach = blocks * args.page
    for most in (args.window, args.chunk):
        if most:
            reach = min(reach, most + tile.tokens)
    wanted = -(-2 * processors // max(tiles * args.layout.kv_heads, 1))
    return max(1, min(wanted, -(-reach // LEAST), MOST_SPLITS))


def attend(args: AttentionArgs) -> Tensor:
    return _attend(args, None)


def attend_rotary(args: AttentionArgs, rotary: Rotary) -> Tensor:
    """Attend with queries and keys that are rotated by the launch that writes the cache."""
    return _attend(args, rotary)


def _attend(args: AttentionArgs, rotary: Rotary | None) -> Tensor:
    from ..kernels.gpu.launch import processors

    tile = tiling(args)
    return run(args, tile, splits_of(args, tile, processors(args.query.device)), rotary=rotary)


def run(
    args: AttentionArgs, tile: Tiling, splits: int, least: int = LEAST, rotary: Rotary | None = None
) -> Tensor:
    """Attend with a given tile and number of pieces; `least`: tokens of a piece."""
    from ._triton_attend import attend_tiles
    from ._triton_rotary import rotate_and_write
    from ._triton_write import write

    if not args.query.numel():
        return args.query.new_empty(args.query.shape)
    if rotary is None:
        write(args)
    else:
        args = replace(args, query=rotate_and_write(args, rotary))
    return attend_tiles(args, tile, splits, least)


def _power_above(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
