"""Attention as it is defined, one sequence after the other, in float32: the twin of every other kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _portable
from ._args import AttentionArgs

PRIORITY = 10


def missing() -> str | None:
    return None


def refuses(args: AttentionArgs) -> str | None:
    return None


def attend(args: AttentionArgs) -> Tensor:
    _portable.write(args)
    out = args.query.new_empty(args.query.shape)  # dense, as the operator's shape function says
    starts, lengths = args.query_start.tolist(), args.seq_lens.tolist()
    for row, length in enumerate(lengths):
        part = slice(starts[row], starts[row + 1])
        if part.start == part.stop:
            continue
        key, value = _portable.read(args, row, length)
        query = args.query[part].float()
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = torch.einsum("qhd,khd->hqk", query, key) * args.scale
        if args.softcap:
            logits = args.softcap * torch.tanh(logits / args.softcap)
        if args.slopes is not None:
            logits += _portable.position_bias(args.slopes, len(query), length)
        hidden = ~_portable.visible(len(query), length, args.window, args.chunk, query.device)
        logits = logits.masked_fill(hidden, -torch.inf)
        if args.sinks is not None:
            sinks = args.sinks.float()[:, None, None].expand(-1, len(query), 1)
            weights = torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1]
        else:
            weights = torch.softmax(logits, -1)
        out[part] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out
