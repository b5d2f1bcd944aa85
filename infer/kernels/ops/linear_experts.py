"""Linear layers of a mixture of experts: `y[i] = x[i // top_k] @ weight[expert[i]].T`.

    linear_experts                float weights [E, N, K], or [E, K, N] when `transposed`
    linear_experts_int8           int8 codes [E * N, K], activations to int8 per token
    linear_experts_int8_weight    int8 codes, float activations
    linear_experts_codes          codes with scales, the tensors of `coded_weight` with E * N rows

x is [R, K], expert int64 [R * top_k], the result [R * top_k, N] in x's dtype: row i of x goes to the experts
`expert[i * top_k : (i + 1) * top_k]`. The references gather the rows of each expert that is asked for and compute
with the operator of a plain linear layer, so that no other expert's weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .coded_weight import rows_of
from .define_op import define
from .linear_codes import WEIGHT


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


def _of(name: str, parts: tuple[str, ...]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return reference and decomposition of `linear_experts_<name>`, from the operator of one layer.

    `parts`: names of the operands that hold the rows of one expert after another.
    """

    def one(given: tuple[Any, ...], features: int) -> Callable[[Tensor, int], Tensor]:
        held = {part: tensor for part, tensor in zip(parts, given, strict=True) if tensor is not None}
        op = getattr(torch.ops.infer, f"linear_{name}")

        def compute(rows: Tensor, e: int) -> Tensor:
            own = rows_of(held, e * features, (e + 1) * features)
            return op(rows, *map(own.get, parts))  # type: ignore[no-any-return]

        return compute

    def reference(x: Tensor, expert: Tensor, *given: Any) -> Tensor:
        *tensors, features, top_k = given
        compute = one(tuple(tensors), features)
        return by_expert(x, expert, len(tensors[0]) // features, features, top_k, compute)

    def plain(x: Tensor, expert: Tensor, *given: Any) -> Tensor:
        *tensors, features, top_k = given
        return every_expert(x, expert, len(tensors[0]) // features, top_k, one(tuple(tensors), features))

    return reference, plain


def _shape(x: Tensor, expert: Tensor, *given: Any) -> Tensor:
    return x.new_empty((expert.shape[0], given[-2]))


def _int8_shape(x: Tensor, expert: Tensor, codes: Tensor, *given: Any) -> Tensor:
    torch._check(
        x.shape[-1] == codes.shape[1], lambda: f"x has {x.shape[-1]} columns, codes {codes.shape[1]}"
    )
    return _shape(x, expert, *given)


_FORMS = {
    "int8": ("Tensor codes, Tensor scale", _int8_shape),
    "int8_weight": ("Tensor codes, Tensor scale", _int8_shape),
    "codes": (WEIGHT, _shape),
}
for _name, (_operands, _of_shape) in _FORMS.items():
    _reference, _plain = _of(_name, tuple(operand.split()[1] for operand in _operands.split(", ")))
    define(
        f"linear_experts_{_name}(Tensor x, Tensor expert, {_operands}, int features, int top_k) -> Tensor",
        _reference,
        _of_shape,
        _plain,
        sparse=True,
    )
