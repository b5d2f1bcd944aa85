"""Layers on the codes of a groupwise-quantized checkpoint; the tensors are those of `groupwise_codes`.

linear_groupwise(x, codes, scale, table, minimum, super_scale, super_minimum, bias)   [..., K] → [..., N]
embedding_groupwise(ids, codes, scale, …)                                            [...] → float32 [..., K]
linear_experts_groupwise(x, expert, codes, scale, …, features, top_k)                as in `linear_experts`

linear_groupwise_packed, linear_experts_groupwise_packed: the same on weights packed for this CPU, see
`cpu.groupwise_layout`; activations to int8 for each 64 columns, as `linear_lut4_packed` has them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .bitpack import GROUP, unpack, unpack_arithmetic
from .define_op import declare, define
from .groupwise_codes import decode, num_columns
from .linear_experts import by_expert, every_expert
from .linear_int8 import LEVELS, TINY, to_grid
from .linear_lut import row_blocks
from .linear_packed import rounded_table

Optional = Tensor | None
OPERANDS = (
    "Tensor codes, Tensor scale, Tensor? table, Tensor? minimum, Tensor? super_scale, Tensor? super_minimum"
)


def rows_of(tensors: tuple[Optional, ...], start: int, stop: int) -> tuple[Optional, ...]:
    """Return rows of the operands (codes, scale, table, minimum, super_scale, super_minimum); the table stays whole."""
    return tuple(t if i == 2 or t is None else t[start:stop] for i, t in enumerate(tensors))


def _linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    table: Optional,
    minimum: Optional,
    super_scale: Optional,
    super_minimum: Optional,
    bias: Optional = None,
    unpacked: Callable[[Tensor, int], Tensor] = unpack,
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    operands = (codes, scale, table, minimum, super_scale, super_minimum)
    kind = x.dtype if dtype is None else dtype
    parts = []
    for start, stop in row_blocks(codes.shape[0], num_columns(codes, table)):
        weight = decode(*rows_of(operands, start, stop), unpacked=unpacked)  # type: ignore[arg-type]
        parts.append(F.linear(x.to(kind), weight.to(kind)))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return (y if bias is None else y + bias.to(kind)).to(x.dtype)


def _linear_shape(x: Tensor, codes: Tensor, scale: Tensor, table: Optional, *rest: Optional) -> Tensor:
    columns = num_columns(codes, table)
    torch._check(x.shape[-1] == columns, lambda: f"x has {x.shape[-1]} columns, codes {columns}")
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _embedding(
    ids: Tensor,
    codes: Tensor,
    scale: Tensor,
    table: Optional,
    *rest: Optional,
    unpacked: Callable[[Tensor, int], Tensor] = unpack,
) -> Tensor:
    flat = ids.reshape(-1)
    picked = [None if tensor is None else tensor.index_select(0, flat) for tensor in (codes, scale, *rest)]
    rows = decode(picked[0], picked[1], table, *picked[2:], unpacked=unpacked)  # type: ignore[arg-type]
    return rows.reshape(*ids.shape, rows.shape[-1])


def _embedding_shape(ids: Tensor, codes: Tensor, scale: Tensor, table: Optional, *rest: Optional) -> Tensor:
    return codes.new_empty((*ids.shape, num_columns(codes, table)), dtype=torch.float32)


def _one(operands: tuple[Optional, ...], features: int) -> Callable[[Tensor, int], Tensor]:
    def compute(rows: Tensor, e: int) -> Tensor:
        own = rows_of(operands, e * features, (e + 1) * features)
        return torch.ops.infer.linear_groupwise(rows, *own)

    return compute


def _experts(x: Tensor, expert: Tensor, codes: Tensor, *rest: object) -> Tensor:
    *operands, features, top_k = rest
    one = _one((codes, *operands), int(features))  # type: ignore[arg-type,call-overload]
    return by_expert(x, expert, len(codes) // int(features), int(features), int(top_k), one)  # type: ignore[call-overload]


def _experts_plain(x: Tensor, expert: Tensor, codes: Tensor, *rest: object) -> Tensor:
    *operands, features, top_k = rest
    one = _one((codes, *operands), int(features))  # type: ignore[arg-type,call-overload]
    return every_expert(x, expert, len(codes) // int(features), int(top_k), one)  # type: ignore[call-overload]


def _experts_shape(x: Tensor, expert: Tensor, *rest: object) -> Tensor:
    return x.new_empty((expert.shape[0], next(value for value in rest if isinstance(value, int))))


def groupwise_twin(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    table: Optional,
    minimum: Optional,
    super_scale: Optional,
    super_minimum: Optional,
    bias: Optional = None,
) -> Tensor:
    """Compute `linear_groupwise_packed` from the portable tensors: x float32 [..., K] → [..., N].

    The table is rounded to int8, and so is each group of 64 columns of x, whatever the groups of the weight; codes
    without a table are at least -127.
    """
    rows = x.float().reshape(-1, x.shape[-1])
    steps = (
        (rows.reshape(len(rows), -1, GROUP).abs().amax(2) / LEVELS)
        .clamp_min(TINY)
        .repeat_interleave(GROUP, 1)
    )
    q = to_grid(rows, steps) * steps
    if table is None:
        codes = codes.clamp(min=-LEVELS)
    else:
        rounded, factor = rounded_table(table)
        table = rounded.float() * (factor / LEVELS)[:, None]
    weight = decode(codes, scale, table, minimum, super_scale, super_minimum)
    y = (q.double() @ weight.double().t()).float()
    y = y if bias is None else y + bias.float()
    return y.reshape(*x.shape[:-1], codes.shape[0])


define(
    f"linear_groupwise(Tensor x, {OPERANDS}, Tensor? bias=None) -> Tensor",
    _linear,
    _linear_shape,
    partial(_linear, unpacked=unpack_arithmetic, dtype=None),
)
define(
    f"embedding_groupwise(Tensor ids, {OPERANDS}) -> Tensor",
    _embedding,
    _embedding_shape,
    partial(_embedding, unpacked=unpack_arithmetic),
)
define(
    f"linear_experts_groupwise(Tensor x, Tensor expert, {OPERANDS}, int features, int top_k) -> Tensor",
    _experts,
    _experts_shape,
    _experts_plain,
    sparse=True,
)


def _packed_shape(
    x: Tensor, codes: Tensor, scale: Tensor, table: Tensor, bias: Optional, *sizes: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], sizes[-1]))


def _packed_experts_shape(x: Tensor, expert: Tensor, *rest: object) -> Tensor:
    _, features, _ = (value for value in rest if isinstance(value, int))
    return x.new_empty((expert.shape[0], features))


declare(
    "linear_groupwise_packed(Tensor x, Tensor codes, Tensor scale, Tensor table, Tensor? bias, int layout, "
    "int out_features) -> Tensor",
    _packed_shape,
)
declare(
    "linear_experts_groupwise_packed(Tensor x, Tensor expert, Tensor codes, Tensor scale, Tensor table, int layout, "
    "int features, int top_k) -> Tensor",
    _packed_experts_shape,
)
