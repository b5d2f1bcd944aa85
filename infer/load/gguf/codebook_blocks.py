"""GGUF's types of indices into codebooks (IQ1 to IQ3) and of ternary numbers (TQ1_0, TQ2_0), split into codes.

Several weights share an index of a codebook; here each gets a code of its own, of 2 to 4 bits, and with it its sign.
Values are those of ggml's `dequantize_row_*`: whatever the order of the products, they are exact in float32. Blocks of
256 weights are uint8 [n, bytes]; the parts of n blocks are those of `block_codes.CodeForm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_fields import bits, fields, half, integers, pieces
from .codebooks import points

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class CodebookType:
    """Blocks of `num_bytes`; codes are indices into `table`."""

    num_bytes: int
    table: tuple[float, ...]
    split: Callable[[Tensor], Parts]


def _signs(seven: Tensor) -> Tensor:
    """Return the signs of 8 weights for each 7 bits [n, k], the eighth making their number even: uint8 [n, 8k]."""
    signs = bits(seven.to(torch.uint8)).reshape(-1, 8)
    signs[:, 7] = signs.sum(1) % 2
    return signs.reshape(len(seven), -1)


def _levels(index: Tensor, book: str) -> Tensor:
    """Return the digits of the points [n, k], side by side: uint8 [n, k * digits]."""
    return points(book)[index].flatten(1)


def _signed(levels: Tensor, signs: Tensor, count: int) -> Tensor:
    """Return codes of `count` positive levels and their negatives, in ascending order of their values."""
    return torch.where(signs == 1, count - 1 - levels, count + levels)


def _odd(scales: Tensor) -> Tensor:
    """Return scales 2s + 1 of the numbers s, int8."""
    return (2 * scales + 1).to(torch.int8)


def _iq2_xxs(raw: Tensor) -> Parts:
    words = integers(raw[:, 2:], 4).reshape(len(raw), 8, 2)
    index, last = pieces(words[:, :, 0], (0, 8, 16, 24), 255), words[:, :, 1]
    codes = _signed(_levels(index, "IQ2_XXS"), _signs(pieces(last, (0, 7, 14, 21), 127)), 3)
    return {"codes": codes, "scale": _odd(last >> 28), "super_scale": half(raw[:, :2])}


def _iq2_xs(raw: Tensor) -> Parts:
    words = integers(raw[:, 2:66], 2)
    codes = _signed(_levels(words & 511, "IQ2_XS"), _signs(words >> 9), 3)
    return {"codes": codes, "scale": _odd(pieces(raw[:, 66:], (0, 4), 15)), "super_scale": half(raw[:, :2])}


def _iq2_s(raw: Tensor) -> Parts:
    index = raw[:, 2:34].long() | pieces(raw[:, 66:74], (0, 2, 4, 6), 3) << 8
    codes = _signed(_levels(index, "IQ2_S"), bits(raw[:, 34:66]), 3)
    return {"codes": codes, "scale": _odd(pieces(raw[:, 74:], (0, 4), 15)), "super_scale": half(raw[:, :2])}


def _iq3_xxs(raw: Tensor) -> Parts:
    last = integers(raw[:, 66:], 4)
    codes = _signed(_levels(raw[:, 2:66].long(), "IQ3_XXS"), _signs(pieces(last, (0, 7, 14, 21), 127)), 8)
    return {"codes": codes, "scale": _odd(last >> 28), "super_scale": half(raw[:, :2])}


def _iq3_s(raw: Tensor) -> Parts:
    index = raw[:, 2:66].long() | bits(raw[:, 66:74]).long() << 8
    codes = _signed(_levels(index, "IQ3_S"), bits(raw[:, 74:106]), 8)
    return {"codes": codes, "scale": _odd(pieces(raw[:, 106:], (0, 4), 15)), "super_scale": half(raw[:, :2])}


def _shifted(levels: Tensor, down: Tensor) -> Tensor:
    """Return codes of -1, 0 and 1, each raised by 1/8 or (`down`, broadcast over the last dimension) lowered by it."""
    digits = levels.reshape(*down.shape, -1)
    return (2 * digits + (1 - down.to(torch.uint8))[..., None]).flatten(1)


def _iq1_s(raw: Tensor) -> Parts:
    words = integers(raw[:, 34:], 2)
    index = raw[:, 2:34].long() | pieces(words, (0, 3, 6, 9), 7) << 8
    codes = _shifted(_levels(index, "IQ1_S"), words >> 15)
    return {"codes": codes, "scale": _odd(words >> 12 & 7), "super_scale": half(raw[:, :2])}


def _iq1_m(raw: Tensor) -> Parts:
    index = raw[:, :32].long() | pieces(raw[:, 32:48], (0, 4), 7) << 8
    codes = _shifted(_levels(index, "IQ1_S"), pieces(raw[:, 32:48], (3, 7), 1))
    words = integers(raw[:, 48:], 2)
    # The float16 of the block lies in the highest four bits of the four words.
    parts = (words >> 12) << torch.tensor([0, 4, 8, 12])
    supers = parts.sum(1, keepdim=True).to(torch.int32).to(torch.uint16).view(torch.float16)
    return {"codes": codes, "scale": _odd(pieces(words, (0, 3, 6, 9), 7)), "super_scale": supers}


def _tq1_0(raw: Tensor) -> Parts:
    # A byte holds five digits of base 3 as a fraction of 256: each is what the byte times 3 carries.
    found = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        rest = raw[:, start:stop]
        for _ in range(digits):
            tripled = rest.to(torch.int16) * 3
            found.append((tripled >> 8).to(torch.uint8))
            rest = (tripled & 255).to(torch.uint8)
    return {"codes": torch.cat(found, 1), "scale": half(raw[:, 52:])}


def _tq2_0(raw: Tensor) -> Parts:
    return {"codes": fields(raw[:, :64], (0, 2, 4, 6), 3, 32).flatten(1), "scale": half(raw[:, 64:])}


def _both(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the levels with either sign, ascending."""
    return (*(-one for one in reversed(levels)), *levels)


# Six values take three bits; the two that no code names keep the rounding of tables to int8 exact.
_TWO_BITS = (*_both((1.0, 3.125, 5.375)), 0.0, 15.875)
_ONE_BIT = (*_both((0.125, 0.875, 1.125)), 0.0, 0.0)
_THREE_BITS = _both((1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5))
_ODD = _both(tuple(map(float, range(1, 16, 2))))
_TERNARY = (-1.0, 0.0, 1.0, 2.0)
CODEBOOK_TYPES = {
    "IQ2_XXS": CodebookType(66, _TWO_BITS, _iq2_xxs),
    "IQ2_XS": CodebookType(74, _TWO_BITS, _iq2_xs),
    "IQ3_XXS": CodebookType(98, _THREE_BITS, _iq3_xxs),
    "IQ1_S": CodebookType(50, _ONE_BIT, _iq1_s),
    "IQ3_S": CodebookType(110, _ODD, _iq3_s),
    "IQ2_S": CodebookType(82, _TWO_BITS, _iq2_s),
    "IQ1_M": CodebookType(56, _ONE_BIT, _iq1_m),
    "TQ1_0": CodebookType(54, _TERNARY, _tq1_0),
    "TQ2_0": CodebookType(66, _TERNARY, _tq2_0),
}


def decoder(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that gives the weights of blocks of a type, float32 [n, 256]."""
    kind = CODEBOOK_TYPES[name]

    def decode(raw: Tensor) -> Tensor:
        parts = kind.split(raw)
        values = torch.tensor(kind.table)[parts["codes"].int()]
        scale = parts["scale"].float()
        if "super_scale" in parts:
            scale = parts["super_scale"].float() * scale
        return (values.reshape(*scale.shape, -1) * scale[:, :, None]).flatten(1)

    return decode
