"""Blocks of GGUF's types joined from codes, scales and minima: the inverse of `load.gguf.block_codes`, byte for byte.

`parts` of n blocks hold unpacked codes [n, weights of a block], scales and minima, as `CodeForm.split` gives them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .gguf_codebooks import CODEBOOK_JOINS
from .gguf_fields import half_bytes, join_bits, join_fields, join_nibbles

Parts = dict[str, Tensor]


def _q4_0(parts: Parts) -> list[Tensor]:
    return [half_bytes(parts["scale"]), join_nibbles(parts["codes"])]


def _q4_1(parts: Parts) -> list[Tensor]:
    return [half_bytes(parts["scale"]), half_bytes(parts["minimum"]), join_nibbles(parts["codes"])]


def _q5_0(parts: Parts) -> list[Tensor]:
    codes = parts["codes"].clamp(0, 31).to(torch.uint8)
    return [half_bytes(parts["scale"]), join_bits(codes >> 4), join_nibbles(codes & 15)]


def _q5_1(parts: Parts) -> list[Tensor]:
    codes = parts["codes"].clamp(0, 31).to(torch.uint8)
    return [
        half_bytes(parts["scale"]),
        half_bytes(parts["minimum"]),
        join_bits(codes >> 4),
        join_nibbles(codes & 15),
    ]


def _q8_0(parts: Parts) -> list[Tensor]:
    return [half_bytes(parts["scale"]), parts["codes"].to(torch.int8).contiguous().view(torch.uint8)]


def _q2_k(parts: Parts) -> list[Tensor]:
    scales = parts["scale"].to(torch.uint8) | parts["minimum"].to(torch.uint8) << 4
    supers = [half_bytes(parts["super_scale"]), half_bytes(-parts["super_minimum"])]
    return [scales, join_fields(parts["codes"], 32, 2, 4), *supers]


def _q3_k(parts: Parts) -> list[Tensor]:
    codes, scales = parts["codes"].to(torch.uint8), (parts["scale"].to(torch.int16) + 32).to(torch.uint8)
    low = scales.reshape(-1, 2, 8) & 15
    high = (scales >> 4).reshape(len(scales), 4, 4) << (torch.arange(4, dtype=torch.uint8) * 2)[:, None]
    packed = torch.cat([low[:, 0] | low[:, 1] << 4, high.sum(1, dtype=torch.uint8)], 1)
    return [
        join_fields(codes >> 2, 32, 1, 8),
        join_fields(codes & 3, 32, 2, 4),
        packed,
        half_bytes(parts["super_scale"]),
    ]


def _pairs(parts: Parts) -> list[Tensor]:
    """Return the super-scales of Q4_K and Q5_K, and the 12 bytes of their scales and minima of 6 bits."""
    scales, minima = parts["scale"].to(torch.uint8), parts["minimum"].to(torch.uint8)
    first = [one[:, :4] | one[:, 4:] >> 4 << 6 for one in (scales, minima)]
    last = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return [half_bytes(parts["super_scale"]), half_bytes(-parts["super_minimum"]), *first, last]


def _q4_k(parts: Parts) -> list[Tensor]:
    return [*_pairs(parts), join_fields(parts["codes"], 32, 4, 2)]


def _q5_k(parts: Parts) -> list[Tensor]:
    codes = parts["codes"].to(torch.uint8)
    return [*_pairs(parts), join_fields(codes >> 4, 32, 1, 8), join_fields(codes & 15, 32, 4, 2)]


def _q6_k(parts: Parts) -> list[Tensor]:
    codes = parts["codes"].clamp(0, 63).to(torch.uint8)
    scales = parts["scale"].to(torch.int8).contiguous().view(torch.uint8)
    low, high = join_fields(codes & 15, 64, 4, 2), join_fields(codes >> 4, 32, 2, 4)
    return [low, high, scales, half_bytes(parts["super_scale"])]


def _iq4_xs(parts: Parts) -> list[Tensor]:
    scales = (parts["scale"].to(torch.int16) + 32).to(torch.uint8)
    low = scales.reshape(-1, 4, 2) & 15
    high = (scales >> 4).reshape(-1, 2, 4) << (torch.arange(4, dtype=torch.uint8) * 2)
    return [
        *(half_bytes(parts["super_scale"]), high.sum(2, dtype=torch.uint8)),
        *(low[:, :, 0] | low[:, :, 1] << 4, join_fields(parts["codes"], 16, 4, 2)),
    ]


def _mxfp4(parts: Parts) -> list[Tensor]:
    exponent = torch.frexp(parts["scale"].float())[1].to(torch.int32) + 127
    return [exponent.clamp(0, 255).to(torch.uint8), join_nibbles(parts["codes"])]


_JOINS: dict[str, Callable[[Parts], list[Tensor]]] = {
    **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _q4_0},
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs},
    "MXFP4": _mxfp4,
    **CODEBOOK_JOINS,
}


def join_blocks(kind: str, parts: Parts) -> Tensor:
    """Return the blocks uint8 [n, bytes of a block] of a type."""
    return torch.cat(_JOINS[kind](parts), 1)
