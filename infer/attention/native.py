"""Flash-decoding in C++ on CPUs (see kernels/cpu/src/attend/attend.h), in its own page layout.

It is `infer::attend_native`, with the arguments of `infer::attend_paged`: `kernels.passes.prepack` puts it in place
of that in programs that are lowered for a CPU with native kernels. A cache is written and read by one of the two
only: a page has as many bytes, but not the same in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import cpu
from ._args import AttentionArgs


def missing() -> str | None:
    return cpu.why_not()


def refuses(args: AttentionArgs) -> str | None:
    if args.query.device.type != "cpu":
        return f"it computes on the CPU, the query is on {args.query.device}"
    if args.layout.dtype == "float8_e4m3fn":
        return "it has no float8 cache"
    if args.query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it has no {str(args.query.dtype).removeprefix('torch.')}"
    return None


def attend(args: AttentionArgs) -> Tensor:
    """Attend by the native kernel; raises `RuntimeError` when a page, a slot or a length does not fit the cache."""
    cpu.load()
    sinks = None if args.sinks is None else args.sinks.float()
    out: Tensor = torch.ops.infer.attend_native(
        *(args.query, args.key, args.value, args.kv_cache, args.slot_mapping, args.block_table),
        *(args.query_start, args.seq_lens, sinks, args.layer, args.page, args.dtype),
        *(args.scale, args.window, args.softcap, args.slopes, args.chunk),
    )
    return out
