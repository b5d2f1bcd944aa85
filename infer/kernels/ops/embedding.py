"""Rows of packed weights: gathered first, decoded after, so that no weight is ever whole in float.

    embedding_lut(ids, codes, table, scale, row_scale)   tensors of `bitpack`; result in the table's dtype
    embedding_int8(ids, codes, scale)                    int8 [N, K], scale [N]; result in the scale's dtype

ids are int32 or int64 of any shape; the result is [*ids.shape, K]. An id outside 0..N-1 raises IndexError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .bitpack import TABLE_ROWS, columns_of, decode, unpack, unpack_arithmetic
from .define_op import define


def _lut(
    ids: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    unpacked: Callable[[Tensor, int], Tensor] = unpack,
) -> Tensor:
    flat = ids.reshape(-1)
    tables = None if table.shape[0] == 1 else (flat // TABLE_ROWS).to(torch.int32)
    picked = [tensor.index_select(0, flat) for tensor in (codes, scale, row_scale)]
    rows = decode(picked[0], table, picked[1], picked[2], tables, unpacked)
    return rows.to(table.dtype).reshape(*ids.shape, rows.shape[-1])


def _int8(ids: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    rows = codes.index_select(0, flat).float() * scale.index_select(0, flat).float()[:, None]
    return rows.to(scale.dtype).reshape(*ids.shape, codes.shape[1])


def _lut_shape(ids: Tensor, codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
    return table.new_empty((*ids.shape, columns_of(codes, table)))


def _int8_shape(ids: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return scale.new_empty((*ids.shape, codes.shape[1]))


define(
    "embedding_lut(Tensor ids, Tensor codes, Tensor table, Tensor scale, Tensor row_scale) -> Tensor",
    _lut,
    _lut_shape,
    partial(_lut, unpacked=unpack_arithmetic),
)
define("embedding_int8(Tensor ids, Tensor codes, Tensor scale) -> Tensor", _int8, _int8_shape)
