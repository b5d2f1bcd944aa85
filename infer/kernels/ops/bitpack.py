"""Codes of 2 to 6 bits in bytes.

A row of codes is one little-endian stream of bits: code k is bits `k * bits` to `k * bits + bits - 1` of the
row, bit 0 being the lowest bit of byte 0. So of a pair of 4-bit codes the first is the low nibble, eight
3-bit codes fill 3 bytes, four 6-bit codes fill 3 bytes. All arithmetic is on uint8, which every backend can
shift.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 64  # columns that share a scale
FINE = 16  # the smaller group
TABLE_ROWS = 32  # rows that share one of several tables
LEVELS = 127  # of int8 scales
BITS = (2, 3, 4, 6)


def bits_of(table: Tensor) -> int:
    """Return the bits of one code, from the table's width."""
    return int(table.shape[1]).bit_length() - 1


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
