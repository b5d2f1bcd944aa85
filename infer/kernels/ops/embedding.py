"""Rows of packed weights: gathered first, decoded after, so that no weight is ever whole in float.

    embedding_codes(ids, *weight)        tensors of `coded_weight`; result in float32
    embedding_int8(ids, codes, scale)    int8 [N, K], scale [N]; result in the scale's dtype

ids are int32 or int64 of any shape; the result is [*ids.shape, K]. An id outside 0..N-1 raises IndexError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .bitpack import unpack, unpack_arithmetic
from .coded_weight import CodedWeight
from .define_op import define
from .linear_codes import WEIGHT


def _codes(ids: Tensor, *given: Tensor | None, unpacked: Callable[[Tensor, int], Tensor] = unpack) -> Tensor:
    rows = CodedWeight(*given).rows(ids.reshape(-1), unpacked)  # type: ignore[arg-type]
    return rows.reshape(*ids.shape, rows.shape[-1])


def _codes_shape(ids: Tensor, *given: Tensor | None) -> Tensor:
    weight = CodedWeight(*given)  # type: ignore[arg-type]
    return weight.codes.new_empty((*ids.shape, weight.columns), dtype=torch.float32)


def _int8(ids: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    rows = codes.index_select(0, flat).float() * scale.index_select(0, flat).float()[:, None]
    return rows.to(scale.dtype).reshape(*ids.shape, codes.shape[1])


def _int8_shape(ids: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty((*ids.shape, codes.shape[1]))


define(
    f"embedding_codes(Tensor ids, {WEIGHT}) -> Tensor",
    _codes,
    _codes_shape,
    partial(_codes, unpacked=unpack_arithmetic),
)
define("embedding_int8(Tensor ids, Tensor codes, Tensor scale) -> Tensor", _int8, _int8_shape)
