"""Linear layers of a mixture of experts: `y[i] = x[i // top_k] @ weight[expert[i]].T`.

    linear_experts                float weights [E, N, K], or [E, K, N] when `transposed`
    linear_experts_int8           int8 codes [E * N, K], activations to int8 per token
    linear_experts_int8_weight    int8 codes, float activations
    linear_experts_lut            indices into tables, the tensors of `bitpack` with E * N rows

x is [R, K], expert int64 [R * top_k], the result [R * top_k, N] in x's dtype: row i of x goes to the experts
`expert[i * top_k : (i + 1) * top_k]`. The references gather the rows of each expert that is asked for and compute
with the operator of a plain linear layer, so that no other expert's weights are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .bitpack import TABLE_ROWS
from .define_op import define


def by_expert(
    x: Tensor,
    expert: Tensor,
    num_experts: int,
    features: int,
    top_k: int,
    compute: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """Compute `compute(rows, e)` for the rows of each routed expert e: [R * top_k, features]."""
    if expert.numel() != x.shape[0] * top_k:
        raise ValueError(f"expected {x.shape[0] * top_k} experts for {x.shape[0]} rows, got {expert.numel()}")
    y = x.new_empty((expert.numel(), features))
    for e in torch.unique(expert).tolist():
        if not 0 <= e < num_experts:
            raise IndexError(f"expert {e} is not in 0..{num_experts - 1}")
        places = (expert == e).nonzero().squeeze(1)
        y[places] = compute(x[places // top_k], e)
    return y


def every_expert(
    x: Tensor, expert: Tensor, num_experts: int, top_k: int, compute: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Compute all experts on all rows and select the routed ones, so that no shape depends on values, for exporters."""
    rows = x[:, None].expand(-1, top_k, -1).reshape(-1, x.shape[-1])
    y = compute(rows, 0)
    for e in range(1, num_experts):
        y = torch.where((expert == e)[:, None], compute(rows, e), y)
    return y


def _matrix(weight: Tensor, e: int, transposed: bool) -> Tensor:
    return weight[e].t() if transposed else weight[e]


def _float(x: Tensor, expert: Tensor, weight: Tensor, top_k: int, transposed: bool = False) -> Tensor:
    features = weight.shape[2 if transposed else 1]
    return by_expert(
        x,
        expert,
        len(weight),
        features,
        top_k,
        lambda rows, e: F.linear(rows, _matrix(weight, e, transposed)),
    )


def _float_plain(x: Tensor, expert: Tensor, weight: Tensor, top_k: int, transposed: bool = False) -> Tensor:
    return every_expert(
        x, expert, len(weight), top_k, lambda rows, e: F.linear(rows, _matrix(weight, e, transposed))
    )


def _float_shape(x: Tensor, expert: Tensor, weight: Tensor, top_k: int, transposed: bool = False) -> Tensor:
    return x.new_empty((expert.shape[0], weight.shape[2 if transposed else 1]))


define(
    "linear_experts(Tensor x, Tensor expert, Tensor weight, int top_k, bool transposed=False) -> Tensor",
    _float,
    _float_shape,
    _float_plain,
    sparse=True,
)


def _of_int8(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return reference and decomposition of `linear_experts_<name>`, from the operators of one layer."""

    def one(codes: Tensor, scale: Tensor, features: int) -> Callable[[Tensor, int], Tensor]:
        op = getattr(torch.ops.infer, f"linear_{name}")
        return lambda rows, e: op(
            rows, codes[e * features : (e + 1) * features], scale[e * features : (e + 1) * features]
        )

    def reference(
        x: Tensor, expert: Tensor, codes: Tensor, scale: Tensor, features: int, top_k: int
    ) -> Tensor:
        return by_expert(x, expert, len(codes) // features, features, top_k, one(codes, scale, features))

    def plain(x: Tensor, expert: Tensor, codes: Tensor, scale: Tensor, features: int, top_k: int) -> Tensor:
        return every_expert(x, expert, len(codes) // features, top_k, one(codes, scale, features))

    return reference, plain


def _int8_shape(x: Tensor, expert: Tensor, codes: Tensor, scale: Tensor, features: int, top_k: int) -> Tensor:
    torch._check(
        x.shape[-1] == codes.shape[1], lambda: f"x has {x.shape[-1]} columns, codes {codes.shape[1]}"
    )
    return x.new_empty((expert.shape[0], features))


for _name in ("int8", "int8_weight"):
    _reference, _plain = _of_int8(_name)
    define(
        f"linear_experts_{_name}(Tensor x, Tensor expert, Tensor codes, Tensor scale, int features, int top_k) "
        "-> Tensor",
        _reference,
        _int8_shape,
        _plain,
        sparse=True,
    )


def _one_lut(
    codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor, features: int
) -> Callable[[Tensor, int], Tensor]:
    """Compute with the rows of one expert; a table for each `TABLE_ROWS` rows begins anew with each expert."""

    def compute(rows: Tensor, e: int) -> Tensor:
        part = slice(e * features, (e + 1) * features)
        own = table
        if len(table) > 1:
            own = table[e * features // TABLE_ROWS : (e + 1) * features // TABLE_ROWS]
        return torch.ops.infer.linear_lut(rows, codes[part], own, scale[part], row_scale[part])

    return compute


def _lut(
    x: Tensor,
    expert: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    features: int,
    top_k: int,
) -> Tensor:
    one = _one_lut(codes, table, scale, row_scale, features)
    return by_expert(x, expert, len(codes) // features, features, top_k, one)


def _lut_plain(
    x: Tensor,
    expert: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    features: int,
    top_k: int,
) -> Tensor:
    one = _one_lut(codes, table, scale, row_scale, features)
    return every_expert(x, expert, len(codes) // features, top_k, one)


def _lut_shape(
    x: Tensor,
    expert: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    features: int,
    top_k: int,
) -> Tensor:
    return x.new_empty((expert.shape[0], features))


define(
    "linear_experts_lut(Tensor x, Tensor expert, Tensor codes, Tensor table, Tensor scale, Tensor row_scale, "
    "int features, int top_k) -> Tensor",
    _lut,
    _lut_shape,
    _lut_plain,
    sparse=True,
)
