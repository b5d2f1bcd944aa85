"""Codes of 2, 3, 4 or 6 bits in bytes, and their decoding.

A row of codes is one little-endian stream of bits: code k is bits `k * bits` to `k * bits + bits - 1` of the
row, bit 0 being the lowest bit of byte 0. So of a pair of 4-bit codes the first is the low nibble, eight
3-bit codes fill 3 bytes, four 6-bit codes fill 3 bytes. All arithmetic is on uint8, which every backend can
shift.

    codes      uint8   [N, K * bits / 8]
    table      float32 [T, 2**bits]      T = 1, or one for each `TABLE_ROWS` rows (the last may have fewer)
    scale      int8    [N, K / group]    signed; `scale / 127 * row_scale` steps a group of 64 weights, or of 16
    row_scale  float32 [N]
    weight[n, k] = table[n // TABLE_ROWS, code[n, k]] * scale[n, k // group] / 127 * row_scale[n]

Groups of 16 have codes of 4 bits, in rows that are whole groups of 64: activations are quantized by 64 either way.

The 8-bit scale of scales is the double quantization of QLoRA (Dettmers et al. 2023, section 3), here per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

GROUP = 64
FINE = 16  # the smaller group
TABLE_ROWS = 32
LEVELS = 127
BITS = (2, 3, 4, 6)


def bits_of(table: Tensor) -> int:
    """Return the bits of one code, from the table's width."""
    return int(table.shape[1]).bit_length() - 1


def columns_of(codes: Tensor, table: Tensor) -> int:
    """Return K, the number of weights of one row."""
    return codes.shape[1] * 8 // bits_of(table)


def group_of(codes: Tensor, table: Tensor, scale: Tensor) -> int:
    """Return how many weights share a scale, `GROUP` or `FINE`; raises `ValueError` for any other number."""
    bits, columns, groups = bits_of(table), columns_of(codes, table), scale.shape[1]
    for group in (GROUP, FINE) if bits == 4 else (GROUP,):
        if groups * group == columns and columns % GROUP == 0:
            return group
    raise ValueError(f"{groups} scales for {columns} columns of {bits} bits: no groups of {GROUP} or {FINE}")


def _unit(bits: int) -> tuple[int, int]:
    """Bytes and codes after which the bit pattern repeats."""
    num_bytes = math.lcm(bits, 8) // 8
    return num_bytes, num_bytes * 8 // bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [N, K] below 2**bits → uint8 [N, K * bits / 8]; K is a multiple of 8."""
    num_bytes, num_codes = _unit(bits)
    units = codes.reshape(codes.shape[0], -1, num_codes)
    packed = torch.zeros((*units.shape[:2], num_bytes), dtype=torch.uint8, device=codes.device)
    for i in range(num_codes):
        byte, shift = divmod(i * bits, 8)
        packed[..., byte] |= units[..., i] << shift
        if shift + bits > 8:
            packed[..., byte + 1] |= units[..., i] >> (8 - shift)
    return packed.reshape(codes.shape[0], -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack`: uint8 [N, K]."""
    num_bytes, num_codes = _unit(bits)
    units = packed.reshape(packed.shape[0], packed.shape[1] // num_bytes, num_bytes)
    parts = []
    for i in range(num_codes):
        byte, shift = divmod(i * bits, 8)
        part = units[..., byte] >> shift if shift else units[..., byte]
        if shift + bits > 8:
            rest = units[..., byte + 1] & (2 ** (shift + bits - 8) - 1)
            part = part | (rest << (8 - shift))
        elif shift + bits < 8:
            part = part & (2**bits - 1)
        parts.append(part)
    return torch.stack(parts, -1).reshape(packed.shape[0], packed.shape[1] * 8 // bits)


def unpack_arithmetic(packed: Tensor, bits: int) -> Tensor:
    """Unpack to float32 without shifts: compilers vectorise it, and torch's ONNX export shifts wrongly."""
    num_bytes, num_codes = _unit(bits)
    units = packed.reshape(packed.shape[0], packed.shape[1] // num_bytes, num_bytes).float()

    def above(byte: int, shift: int) -> Tensor:
        return units[..., byte] if shift == 0 else (units[..., byte] * 2.0**-shift).floor()

    parts = []
    for i in range(num_codes):
        byte, shift = divmod(i * bits, 8)
        part, end = above(byte, shift), shift + bits
        if end < 8:
            part = part - above(byte, end) * 2**bits
        elif end > 8:
            part = part + (units[..., byte + 1] - above(byte + 1, end - 8) * 2 ** (end - 8)) * 2 ** (
                8 - shift
            )
        parts.append(part)
    return torch.stack(parts, -1).reshape(packed.shape[0], packed.shape[1] * 8 // bits)


def decode(
    packed: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    table_rows: Tensor | None,
    unpacked: Callable[[Tensor, int], Tensor] = unpack,
) -> Tensor:
    """float32 [N, K]. `table_rows` int32 [N] says which table each row uses; None when there is one table."""
    bits = bits_of(table)
    index = unpacked(packed, bits).to(torch.int32)
    if table_rows is not None:
        index = index + (table_rows * 2**bits)[:, None]
    values = table.float().reshape(-1).index_select(0, index.reshape(-1))
    step = scale.float() * (row_scale.float() / LEVELS)[:, None]
    columns = columns_of(packed, table)
    grouped = values.reshape(packed.shape[0], scale.shape[1], columns // scale.shape[1]) * step[:, :, None]
    return grouped.reshape(packed.shape[0], columns)


def tables_of_rows(num_rows: int, table: Tensor, start: int = 0) -> Tensor | None:
    """Return the `table_rows` of rows `start` to `start + num_rows` of a whole weight."""
    if table.shape[0] == 1:
        return None
    return torch.arange(start, start + num_rows, dtype=torch.int32, device=table.device) // TABLE_ROWS
