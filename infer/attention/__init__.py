"""Attention over a paged KV cache: the operator `infer::attend_paged`, and one file for each way to compute it.

A flat run of T tokens holds the new tokens of B sequences, one after the other. Their keys and values are written to
the cache, then each query attends to the whole past of its sequence. Sequence b owns the queries
`query_start[b]:query_start[b+1]`; it has `seq_lens[b]` tokens after this step, of which those are the last; token i
lies in page `block_table[b, i // page]` at place `i % page`.

The cache is bytes: uint8 [layers, pages, page_bytes]. Whoever moves pages (prefix cache, copy on write) copies whole
ones; what is inside is the kernel's own matter. The portable layout of a page, which every kernel uses unless it says
otherwise: keys [kv_heads, page, head_dim], then values of that shape; of int8 and float8 e4m3, then the steps of the
keys and of the values, float32 [kv_heads, page] each (code * step; the largest of a token and head is at ±127 or ±448).

A plug-in is one file. It defines `PRIORITY` (of those that can, the one with the largest computes: triton 30, sdpa 20,
reference 10), `missing()` (why this machine can't, or None), `refuses(args)` (why not these arguments, or None) and
`attend(args) -> Tensor`. One without `PRIORITY` has a page layout of its own and is no choice for this operator.

`infer::attend_paged_rotary` also applies the rotary embedding to queries and keys. A plug-in that does so in its own
kernels defines `attend_rotary(args, rotary) -> Tensor`; others are given what plain torch rotated.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from .. import plugins
from ..errors import NotUsableError
from ..kernels.ops import define_op
from ..kernels.passes.rotary.form import RotaryForm
from ._args import AttentionArgs, Rotary
from ._pages import KV_DTYPES, PageLayout
from ._portable import alibi, visible

FOLDER = "infer.attention"

__all__ = ["KV_DTYPES", "AttentionArgs", "PageLayout", "Rotary", "alibi", "choose", "visible"]


_CHOSEN: dict[tuple[object, ...], str] = {}


def kernels() -> list[tuple[str, ModuleType]]:
    """List the plug-ins of the portable page layout, by name, the largest `PRIORITY` first."""
    found = [(name, plugins.get(FOLDER, name)) for name in plugins.names(FOLDER)]
    portable = [one for one in found if hasattr(one[1], "PRIORITY")]
    return sorted(portable, key=lambda one: (-one[1].PRIORITY, one[0]))


def choose(args: AttentionArgs) -> str:
    """Return the plug-in that computes the portable operator for such arguments, chosen once per process.

    Raises `NotUsableError` with the reason of each plug-in.
    """
    kind = (
        *(args.query.device.type, args.query.dtype, args.layout, bool(args.softcap)),
        *(args.sinks is not None, 0 if args.slopes is None else args.slopes.dim(), bool(args.chunk)),
    )
    if kind not in _CHOSEN:
        reasons = []
        for name, kernel in kernels():
            reason = kernel.missing() or kernel.refuses(args)
            if reason is None:
                _CHOSEN[kind] = name
                break
            reasons.append(f"{name}: {reason}")
        else:
            raise NotUsableError(f"no attention kernel for {args.query.device}: {'; '.join(reasons)}")
    return _CHOSEN[kind]


def _attend(*given: Any, **named: Any) -> Tensor:
    """Compute the operator, whose arguments are the fields of `AttentionArgs`."""
    args = AttentionArgs(*given, **named)
    args.check()
    return plugins.get(FOLDER, choose(args)).attend(args)


def _attend_rotary(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: int,
    width: int,
    order: int,
    *rest: Any,
    **named: Any,
) -> Tensor:
    args = AttentionArgs(query, key, value, *rest, **named)
    rotary = Rotary(cos, sin, RotaryForm(start, width, order))
    args.check()
    rotary.check(args)
    kernel = plugins.get(FOLDER, choose(args))
    if hasattr(kernel, "attend_rotary"):
        return kernel.attend_rotary(args, rotary)
    return kernel.attend(rotary.applied(args))


def _shape(query: Tensor, *rest: object) -> Tensor:
    return query.new_empty(query.shape)


_HEADS = "Tensor query, Tensor key, Tensor value"
_REST = (
    "Tensor(a!) kv_cache, Tensor slot_mapping, Tensor block_table, "
    "Tensor query_start, Tensor seq_lens, Tensor? sinks, int layer, int page, int dtype, float scale, int window, "
    "float softcap, Tensor? slopes=None, int chunk=0"  # the last two are later: older programs lack them
)
ARGUMENTS = f"{_HEADS}, {_REST}"
define_op.define(f"attend_paged({ARGUMENTS}) -> Tensor", _attend, _shape)
define_op.define(
    f"attend_paged_rotary({_HEADS}, Tensor cos, Tensor sin, int start, int width, int order, {_REST}) -> Tensor",
    _attend_rotary,
    _shape,
)
define_op.declare(f"attend_native({ARGUMENTS}) -> Tensor", _shape)  # `native`: own page layout, CPU only
