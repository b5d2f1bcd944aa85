"""Linear layers whose weight is packed indices into a table: nf4 (one table), cluster (a table for 32 rows).

`linear_lut(x, codes, table, scale, row_scale, bias)`; the tensors are those of `bitpack`. x is [..., K] of
any float dtype and the result has it. Codes of 2, 3, 4 and 6 bits, known from the table's width; a scale for each 64
or 16 columns, known from their number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .bitpack import TABLE_ROWS, columns_of, decode, group_of, tables_of_rows, unpack_arithmetic
from .define_op import define

# A large weight (the output layer of a language model) is decoded in pieces of this many weights.
BLOCK = 1 << 24


def row_blocks(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    """Return row ranges of at most `BLOCK` weights, cut where a table ends."""
    rows = max(BLOCK // max(num_columns, 1) // TABLE_ROWS, 1) * TABLE_ROWS
    return [(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def _linear(
    x: Tensor, codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    values = x.float()
    blocks = row_blocks(codes.shape[0], columns_of(codes, table))
    parts = []
    for start, stop in blocks:
        part, tables = slice(start, stop), tables_of_rows(stop - start, table, start)
        parts.append(F.linear(values, decode(codes[part], table, scale[part], row_scale[part], tables)))
    y = torch.cat(parts, -1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _linear_plain(
    x: Tensor, codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute as the reference, with the product in x's dtype, which accelerators have units for."""
    blocks = row_blocks(codes.shape[0], columns_of(codes, table))
    parts = []
    for start, stop in blocks:
        part, tables = slice(start, stop), tables_of_rows(stop - start, table, start)
        weight = decode(codes[part], table, scale[part], row_scale[part], tables, unpack_arithmetic)
        parts.append(F.linear(x, weight.to(x.dtype)))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return y if bias is None else y + bias.to(x.dtype)


def _shape(
    x: Tensor, codes: Tensor, table: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    columns = columns_of(codes, table)
    torch._check(x.shape[-1] == columns, lambda: f"x has {x.shape[-1]} columns, codes {columns}")
    group_of(codes, table, scale)
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


define(
    "linear_lut(Tensor x, Tensor codes, Tensor table, Tensor scale, Tensor row_scale, Tensor? bias=None) "
    "-> Tensor",
    _linear,
    _shape,
    _linear_plain,
)
