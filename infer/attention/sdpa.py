"""torch's scaled_dot_product_attention over gathered pages, the query heads of a KV head packed as its rows.

Never `enable_gqa`, which reads keys and values once for each query head. No soft cap and no sinks: those are refused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import _portable
from ._args import AttentionArgs

PRIORITY = 20


def missing() -> str | None:
    return None


def refuses(args: AttentionArgs) -> str | None:
    if args.softcap:
        return "scaled_dot_product_attention has no soft cap"
    return "scaled_dot_product_attention has no sinks" if args.sinks is not None else None


def attend(args: AttentionArgs) -> Tensor:
    _portable.write(args)
    out = args.query.new_empty(args.query.shape)  # dense, as the operator's shape function says
    starts, lengths = args.query_start.tolist(), args.seq_lens.tolist()
    for row, length in enumerate(lengths):
        part = slice(starts[row], starts[row + 1])
        count = part.stop - part.start
        if not count:
            continue
        key, value = (x.transpose(0, 1)[None].to(args.query.dtype) for x in _portable.read(args, row, length))
        groups = args.query.shape[1] // key.shape[1]
        query = args.query[part].unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)[None]
        mask = None
        if count > 1 or args.window or args.chunk or args.slopes is not None:
            mask = _portable.visible(count, length, args.window, args.chunk, query.device).repeat(groups, 1)
        if args.slopes is not None and mask is not None:
            bias = _portable.position_bias(args.slopes, count, length).expand(-1, count, -1)
            bias = bias.unflatten(0, (-1, groups)).flatten(1, 2)
            mask = bias.masked_fill(~mask, -torch.inf)[None].to(query.dtype)
        got = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=args.scale)[0]
        out[part] = got.unflatten(1, (groups, count)).permute(2, 0, 1, 3).flatten(1, 2)
    return out
