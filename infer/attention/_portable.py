"""The portable page layout, read and written in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ._args import AttentionArgs

LEVELS, LARGEST_FLOAT8 = 127, 448
TINY = 1e-30


def write(args: AttentionArgs) -> None:
    """Put the new keys and values into their slots; tokens with slot -1 are left out."""
    kept = args.slot_mapping >= 0
    slots = args.slot_mapping[kept]
    pages, places = slots // args.page, slots % args.page
    parts = args.layout.parts(args.kv_cache[args.layer])
    for given, codes, steps in (
        (args.key, parts.key, parts.key_step),
        (args.value, parts.value, parts.value_step),
    ):
        rows = given[kept]
        if steps is None:
            codes[pages, :, places] = rows.to(codes.dtype)
            continue
        rows, most = rows.float(), LEVELS if codes.dtype == torch.int8 else LARGEST_FLOAT8
        step = (rows.abs().amax(-1) / most).clamp_min(TINY)
        ratio = rows / step[..., None]
        ratio = ratio.round() if codes.dtype == torch.int8 else ratio.clamp(-most, most)
        codes.view(torch.int8)[pages, :, places] = ratio.to(codes.dtype).view(torch.int8)
        steps[pages, :, places] = step


def read(args: AttentionArgs, row: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first `length` keys and values of a sequence, float32 [length, kv_heads, head_dim]."""
    count = -(-length // args.page)
    pages = args.block_table[row, :count].long()
    parts = args.layout.parts(args.kv_cache[args.layer][pages])
    both = []
    for codes, steps in ((parts.key, parts.key_step), (parts.value, parts.value_step)):
        values = codes.float() if steps is None else codes.float() * steps[..., None]
        both.append(values.transpose(1, 2).flatten(0, 1)[:length])
    return both[0], both[1]


def visible(queries: int, length: int, window: int, chunk: int, device: torch.device) -> Tensor:
    """Return bool [queries, length]: the tokens that each of the last `queries` tokens of a sequence sees."""
    own = torch.arange(length - queries, length, device=device)[:, None]
    other = torch.arange(length, device=device)[None, :]
    seen = other <= own
    if window:
        seen &= other > own - window
    return seen & (other >= own // chunk * chunk) if chunk else seen


def position_bias(slopes: Tensor, queries: int, length: int) -> Tensor:
    """Return what is added to the logits of the last `queries` tokens, float32 [heads, queries or 1, length].

    It is ALiBi for slopes [heads], else a bias by distance.
    """
    if slopes.dim() == 1:
        return alibi(slopes, length)[:, None]
    own = torch.arange(length - queries, length, device=slopes.device)[:, None]
    distance = (own - torch.arange(length, device=slopes.device)).clamp(0, slopes.shape[1] - 1)
    return slopes.float()[:, distance]


def alibi(slopes: Tensor, length: int) -> Tensor:
    """Return the ALiBi bias of each head and key of a sequence, float32 [heads, length]; 0 at the last one."""
    places = torch.arange(length, device=slopes.device)
    if slopes.dtype == torch.bfloat16:
        return (slopes[:, None] * places).float() - (slopes[:, None] * (length - 1)).float()
    return slopes.float()[:, None] * (places - (length - 1))
