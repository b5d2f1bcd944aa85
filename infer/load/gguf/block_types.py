"""Types of GGUF tensors: floats, and blocks of codes with their scales, decoded to float32 as ggml does.

Layouts as in ggml's `ggml-common.h`; the arithmetic keeps the order of ggml's `dequantize_row_*`, so that the values
are bit-equal. Blocks are uint8 [n, bytes of a block]; results float32 [n, weights of a block].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_fields import bits, fields, half, nibbles
from .codebook_blocks import CODEBOOK_TYPES, decoder

SUPER = 256  # weights of a block of the K types
# 4-bit floats of MXFP4, doubled to be whole; the table of IQ4_NL and IQ4_XS.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class BlockType:
    """One type: `block` weights take `num_bytes`; `dtype` is that of the values read."""

    name: str
    block: int
    num_bytes: int
    dtype: torch.dtype = torch.float32
    decode: Callable[[Tensor], Tensor] | None = None  # None: stored as `dtype`

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` weights, a multiple of the block."""
        return width // self.block * self.num_bytes


def _half(raw: Tensor) -> Tensor:
    """View uint8 [n, 2k] as float16 and widen it: float32 [n, k]."""
    return half(raw).float()


def _lookup(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.float32)[codes.int()]


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * (nibbles(raw[:, 2:]).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * nibbles(raw[:, 4:]).float() + _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Tensor:
    codes = nibbles(raw[:, 6:]) | bits(raw[:, 2:6]) << 4
    return _half(raw[:, :2]) * (codes.float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    codes = nibbles(raw[:, 8:]) | bits(raw[:, 4:8]) << 4
    return _half(raw[:, :2]) * codes.float() + _half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].contiguous().view(torch.int8).float() * _half(raw[:, :2])


def _q2_k(raw: Tensor) -> Tensor:
    scales, codes = raw[:, :16], fields(raw[:, 16:80], (0, 2, 4, 6), 3, 32)
    step = _half(raw[:, 80:82]) * (scales & 15).float()
    least = _half(raw[:, 82:84]) * (scales >> 4).float()
    return (step[:, :, None] * codes.reshape(-1, 16, 16).float() - least[:, :, None]).flatten(1)


def three_bit_scales(packed: Tensor) -> Tensor:
    """Unpack the 12 bytes of Q3_K: 16 scales of 6 bits, uint8 [n, 16]."""
    low, high = fields(packed[:, :8], (0, 4), 15, 8), fields(packed[:, 8:], (0, 2, 4, 6), 3, 4)
    return (low | high.reshape(-1, 2, 8) << 4).flatten(1)


def _q3_k(raw: Tensor) -> Tensor:
    high, low = fields(raw[:, :32], tuple(range(8)), 1, 32), fields(raw[:, 32:96], (0, 2, 4, 6), 3, 32)
    step = _half(raw[:, 108:110]) * (three_bit_scales(raw[:, 96:108]).float() - 32)
    codes = low.float() - 4 * (1 - high.float())
    return (step[:, :, None] * codes.reshape(-1, 16, 16)).flatten(1)


def six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 12 bytes of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits each."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (last & 15) | (first >> 2 & 48)], 1)
    minima = torch.cat([second & 63, (last >> 4) | (second >> 2 & 48)], 1)
    return scales.float(), minima.float()


def _with_minimum(raw: Tensor, codes: Tensor) -> Tensor:
    """Apply the scales and minima in the first 16 bytes of Q4_K and Q5_K to codes [n, 8, 32]."""
    scales, minima = six_bit_pairs(raw[:, 4:16])
    step, least = _half(raw[:, :2]) * scales, _half(raw[:, 2:4]) * minima
    return (step[:, :, None] * codes.float() - least[:, :, None]).flatten(1)


def _q4_k(raw: Tensor) -> Tensor:
    return _with_minimum(raw, fields(raw[:, 16:], (0, 4), 15, 32))


def _q5_k(raw: Tensor) -> Tensor:
    high = fields(raw[:, 16:48], tuple(range(8)), 1, 32)
    return _with_minimum(raw, fields(raw[:, 48:], (0, 4), 15, 32) | high << 4)


def _q6_k(raw: Tensor) -> Tensor:
    low, high = fields(raw[:, :128], (0, 4), 15, 64), fields(raw[:, 128:192], (0, 2, 4, 6), 3, 32)
    codes = low.reshape(-1, 8, 32) | high << 4
    step = _half(raw[:, 208:]) * raw[:, 192:208].contiguous().view(torch.int8).float()
    return (step[:, :, None] * (codes.float() - 32).reshape(-1, 16, 16)).flatten(1)


def _iq4_nl(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _lookup(nibbles(raw[:, 2:]), IQ4)


def _iq4_xs(raw: Tensor) -> Tensor:
    high = fields(raw[:, 2:4], (0, 2, 4, 6), 3, 1).reshape(-1, 8)
    low = torch.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], 2).flatten(1)
    step = _half(raw[:, :2]) * ((low | high << 4).float() - 32)
    codes = fields(raw[:, 8:], (0, 4), 15, 16).reshape(-1, 8, 32)
    return (step[:, :, None] * _lookup(codes, IQ4)).flatten(1)


def _mxfp4(raw: Tensor) -> Tensor:
    exponent = raw[
        :, :1
    ].int()  # half of 2^(e - 127), as the table is doubled; 0 and 1 give subnormal numbers
    bits = torch.where(exponent < 2, 0x00200000 << exponent, exponent - 1 << 23)
    return bits.view(torch.float32) * _lookup(nibbles(raw[:, 1:]), E2M1)


CODEBOOK_NUMBERS = {
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0"},
}
# Number of a type in the file → the type.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2, torch.float16),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
    2: BlockType("Q4_0", 32, 18, decode=_q4_0),
    3: BlockType("Q4_1", 32, 20, decode=_q4_1),
    6: BlockType("Q5_0", 32, 22, decode=_q5_0),
    7: BlockType("Q5_1", 32, 24, decode=_q5_1),
    8: BlockType("Q8_0", 32, 34, decode=_q8_0),
    10: BlockType("Q2_K", SUPER, 84, decode=_q2_k),
    11: BlockType("Q3_K", SUPER, 110, decode=_q3_k),
    12: BlockType("Q4_K", SUPER, 144, decode=_q4_k),
    13: BlockType("Q5_K", SUPER, 176, decode=_q5_k),
    14: BlockType("Q6_K", SUPER, 210, decode=_q6_k),
    20: BlockType("IQ4_NL", 32, 18, decode=_iq4_nl),
    23: BlockType("IQ4_XS", SUPER, 136, decode=_iq4_xs),
    39: BlockType("MXFP4", 32, 17, decode=_mxfp4),
    **{
        number: BlockType(name, SUPER, CODEBOOK_TYPES[name].num_bytes, decode=decoder(name))
        for number, name in CODEBOOK_NUMBERS.items()
    },
}
# Types that are named in a refusal: those of activations, integers, those that ggml has dropped, and NVFP4, whose files
# hold one more scale for each tensor.
UNREAD_TYPES = {
    **{4: "Q4_2 (dropped by ggml)", 5: "Q4_3 (dropped by ggml)", 9: "Q8_1", 15: "Q8_K"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"},
}
