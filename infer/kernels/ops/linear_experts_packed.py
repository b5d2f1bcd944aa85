"""Layers of experts on weights packed for this CPU, which `prepack` puts in place of the portable operators.

    linear_experts_lut4_packed           `linear_experts_codes`, as `linear_lut4_packed`
    linear_experts_groupwise_packed      `linear_experts_codes`, as `linear_groupwise_packed`
    linear_experts_int8_packed           `linear_experts_int8`, activations on an asymmetric grid for each row
    linear_experts_int8_weight_packed    `linear_experts_int8_weight`

x is [R, K] float32 on the CPU, expert int64 [R * top_k]; the packed blocks of the experts follow each other, each
expert's rows padded to whole blocks. A row has the bits that `linear_*_packed` gives with the weight of its expert.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .define_op import declare


def _shape(x: Tensor, expert: Tensor, *rest: object) -> Tensor:
    features = next(value for value in rest if isinstance(value, int))
    return x.new_empty((expert.shape[0], features))


def _groupwise_shape(x: Tensor, expert: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((expert.shape[0], rest[-2]))


declare(
    "linear_experts_lut4_packed(Tensor x, Tensor expert, Tensor codes, Tensor scale, Tensor table, Tensor row_scale, "
    "int features, int top_k) -> Tensor",
    _shape,
)
declare(
    "linear_experts_groupwise_packed(Tensor x, Tensor expert, Tensor codes, Tensor scale, Tensor table, int layout, "
    "int features, int top_k) -> Tensor",
    _groupwise_shape,
)
declare(
    "linear_experts_int8_packed(Tensor x, Tensor expert, Tensor codes, Tensor scale, Tensor row_sum, int features, "
    "int columns, int top_k) -> Tensor",
    _shape,
)
declare(
    "linear_experts_int8_weight_packed(Tensor x, Tensor expert, Tensor codes, Tensor scale, int features, "
    "int columns, int top_k) -> Tensor",
    _shape,
)
