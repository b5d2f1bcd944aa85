"""Blocks of GGUF's codebook and ternary types joined from codes: the inverse of `load.gguf.codebook_blocks`.

Codes that are no points of a codebook, or of odd signs where a type stores only even ones, become others: who writes a
type decodes it again and compares (`gguf_codes.carry`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..load.gguf.codebooks import find_points
from .gguf_fields import half_bytes, join_bits, join_fields, join_numbers, to_bytes

Parts = dict[str, Tensor]


def _numbered_scales(parts: Parts) -> Tensor:
    """Return the numbers s of scales 2s + 1, int64 [n, groups], 0 to 15."""
    return (parts["scale"].long() >> 1).clamp(0, 15)


def _signed(codes: Tensor, book: str, count: int, digits: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the points int64 [n, 256 / digits], and signs int64 [n, 256], 1 for negative."""
    codes = codes.long()
    negative = (codes < count).long()
    levels = torch.where(negative == 1, count - 1 - codes, codes - count).clamp(0, count - 1)
    index = find_points(book, levels.reshape(-1, digits)).clamp(min=0)
    return index.reshape(len(codes), -1), negative


def _seven(signs: Tensor) -> Tensor:
    """Return the first 7 of 8 signs as numbers, int64 [n, 32]."""
    return join_numbers(signs.reshape(len(signs), -1, 8)[:, :, :7].flatten(1), 7, 1)


def _words(signs: Tensor, scales: Tensor) -> Tensor:
    """Return four times 7 signs with a scale for each 32 weights, int64 [n, 8]."""
    return join_numbers(_seven(signs), 4, 7) | scales << 28


def _halves(scales: Tensor) -> Tensor:
    """Return pairs of scales as bytes."""
    return join_numbers(scales, 2, 4).to(torch.uint8)


def _iq2_xxs(parts: Parts) -> list[Tensor]:
    index, signs = _signed(parts["codes"], "IQ2_XXS", 3, 8)
    first = join_numbers(index, 4, 8)
    words = torch.stack([first, _words(signs, _numbered_scales(parts))], 2).flatten(1)
    return [half_bytes(parts["super_scale"]), to_bytes(words, 4)]


def _iq2_xs(parts: Parts) -> list[Tensor]:
    index, signs = _signed(parts["codes"], "IQ2_XS", 3, 8)
    words = to_bytes(index | _seven(signs) << 9, 2)
    return [half_bytes(parts["super_scale"]), words, _halves(_numbered_scales(parts))]


def _iq2_s(parts: Parts) -> list[Tensor]:
    index, signs = _signed(parts["codes"], "IQ2_S", 3, 8)
    high = join_numbers(index >> 8, 4, 2)
    pieces = [to_bytes(index, 1), join_bits(signs), high.to(torch.uint8)]
    return [half_bytes(parts["super_scale"]), *pieces, _halves(_numbered_scales(parts))]


def _iq3_xxs(parts: Parts) -> list[Tensor]:
    index, signs = _signed(parts["codes"], "IQ3_XXS", 8, 4)
    words = to_bytes(_words(signs, _numbered_scales(parts)), 4)
    return [half_bytes(parts["super_scale"]), index.to(torch.uint8), words]


def _iq3_s(parts: Parts) -> list[Tensor]:
    index, signs = _signed(parts["codes"], "IQ3_S", 8, 4)
    bits = [join_bits(index >> 8), join_bits(signs)]
    return [half_bytes(parts["super_scale"]), to_bytes(index, 1), *bits, _halves(_numbered_scales(parts))]


def _shifted(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the points of IQ1 and whether the first weight of each is lowered, int64 [n, 32]."""
    codes = codes.long().clamp(0, 5)
    index = find_points("IQ1_S", (codes >> 1).reshape(-1, 8)).clamp(min=0)
    return index.reshape(len(codes), -1), 1 - (codes.reshape(len(codes), -1, 8)[:, :, 0] & 1)


def _iq1_s(parts: Parts) -> list[Tensor]:
    index, down = _shifted(parts["codes"])
    high = join_numbers(index >> 8, 4, 3)
    scales = _numbered_scales(parts).clamp(max=7)
    words = high | scales << 12 | down[:, ::4] << 15
    return [half_bytes(parts["super_scale"]), to_bytes(index, 1), to_bytes(words, 2)]


def _iq1_m(parts: Parts) -> list[Tensor]:
    index, down = _shifted(parts["codes"])
    high = join_numbers(index >> 8 | down << 3, 2, 4)
    scales = join_numbers(_numbered_scales(parts).clamp(max=7), 4, 3)
    whole = parts["super_scale"].to(torch.float16).contiguous().view(torch.int16).long() & 0xFFFF
    words = scales | (whole >> torch.tensor([0, 4, 8, 12]) & 15) << 12
    return [to_bytes(index, 1), high.to(torch.uint8), to_bytes(words, 2)]


def _tq1_0(parts: Parts) -> list[Tensor]:
    codes, found, start = parts["codes"].long().clamp(0, 2), [], 0
    for width, digits in ((32, 5), (16, 5), (4, 4)):
        taken = codes[:, start : start + width * digits].reshape(len(codes), digits, width)
        number = (taken * torch.tensor([81, 27, 9, 3, 1])[:digits, None]).sum(1)
        found.append(((number * 256 + 242) // 243).to(torch.uint8))
        start += width * digits
    return [*found, half_bytes(parts["scale"])]


def _tq2_0(parts: Parts) -> list[Tensor]:
    return [join_fields(parts["codes"], 32, 2, 4), half_bytes(parts["scale"])]


CODEBOOK_JOINS: dict[str, Callable[[Parts], list[Tensor]]] = {
    **{"IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s},
    **{"IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0},
}
