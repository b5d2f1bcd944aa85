"""Fields of GGUF's blocks: integers in bits of bytes, read and written by one description.

Blocks are uint8 [n, bytes]. A field gives pieces of numbers; pieces of one part of a block, which may lie in several
fields, are joined to its numbers int [n, numbers].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Numbers = Mapping[str, Tensor]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Piece:
    """`times` numbers side by side in a word, `bits` of each: those from bit `at` on of the numbers of a part.

    The first of them is number `start` of the part, the next lies `step` behind it.
    """

    part: str
    bits: int
    times: int = 1
    at: int = 0
    start: int = 0
    step: int = 1

    def places(self, count: int) -> slice:
        """Return where `count` numbers lie in the part."""
        return slice(self.start, self.start + (count - 1) * self.step + 1, self.step)


class Field(Protocol):
    """Consecutive bytes of a block."""

    @property
    def num_bytes(self) -> int: ...

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces with how many numbers of its part each has."""
        ...

    def split(self, raw: Tensor) -> Iterator[Tensor]:
        """Yield the numbers of each piece [n, numbers], of bytes uint8 [n, `num_bytes`]."""
        ...

    def join(self, numbers: Numbers) -> Tensor:
        """Return the bytes of the numbers of the parts."""
        ...


@dataclass(frozen=True)
class Words:
    """`count` little-endian words of `width` bytes, each filled with `held` from its lowest bit on.

    A piece gives one number of each of `run` words, then the next number of each, and so on with the next words.
    """

    count: int
    width: int
    held: tuple[Piece, ...]
    run: int = 1

    @property
    def num_bytes(self) -> int:
        return self.count * self.width

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        return ((piece, self.count * piece.times) for piece in self.held)

    def split(self, raw: Tensor) -> Iterator[Tensor]:
        words = raw
        if self.width > 1:
            words = raw.clone(memory_format=torch.contiguous_format).view(_WORDS[self.width])
        for piece, shifts in self._placed():
            if piece.bits == 8 * self.width:
                yield words
                continue
            runs = words.reshape(len(raw), -1, self.run)
            mask = (1 << piece.bits) - 1
            yield torch.stack([runs >> shift & mask for shift in shifts], 2).flatten(1)

    def join(self, numbers: Numbers) -> Tensor:
        rows = len(next(iter(numbers.values())))
        words = torch.zeros((rows, self.count // self.run, self.run), dtype=_WORDS[self.width])
        for piece, shifts in self._placed():
            part = numbers[piece.part][:, piece.places(self.count * piece.times)]
            if piece.bits == 8 * self.width:
                return part.to(words.dtype).contiguous().view(torch.uint8)
            part = part >> piece.at & (1 << piece.bits) - 1
            held = part.to(words.dtype).reshape(rows, -1, piece.times, self.run)
            for number, shift in enumerate(shifts):
                words |= held[:, :, number] << shift
        return words.flatten(1).view(torch.uint8)

    def _placed(self) -> Iterator[tuple[Piece, range]]:
        """Yield the pieces with the lowest bit of each of their numbers in a word."""
        begin = 0
        for piece in self.held:
            end = begin + piece.times * piece.bits
            yield piece, range(begin, end, piece.bits)
            begin = end


@dataclass(frozen=True)
class TernaryDigits:
    """Bytes of `digits` digits of base 3 each, as fractions of 256: a byte times 3 carries its first digit.

    The first digits of all bytes are followed by the second ones; the first is number `start` of the part.
    """

    part: str
    num_bytes: int
    digits: int
    start: int = 0

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        yield Piece(self.part, 2, self.digits, start=self.start), self.num_bytes * self.digits

    def split(self, raw: Tensor) -> Iterator[Tensor]:
        digits, rest = [], raw.to(torch.int16)
        for _ in range(self.digits):
            tripled = rest * 3
            digits.append((tripled >> 8).to(torch.uint8))
            rest = tripled & 255
        yield torch.cat(digits, 1)

    def join(self, numbers: Numbers) -> Tensor:
        part = numbers[self.part][:, self.start : self.start + self.num_bytes * self.digits]
        digits = part.long().clamp(0, 2).reshape(len(part), self.digits, self.num_bytes)
        weights = torch.tensor([81, 27, 9, 3, 1])[: self.digits, None]
        return (((digits * weights).sum(1) * 256 + 242) // 243).to(torch.uint8)


def split_fields(fields: Sequence[Field], raw: Tensor) -> dict[str, Tensor]:
    """Return the numbers of all parts, in the smallest of uint8, int16 and int32 that has their bits."""
    found: dict[str, Tensor] = {}
    dtypes, sizes = _dtypes(fields), part_sizes(fields)
    begin = 0
    for field in fields:
        pieces = field.split(raw[:, begin : begin + field.num_bytes])
        for (piece, _), numbers in zip(field.pieces(), pieces, strict=True):
            shifted = numbers.to(dtypes[piece.part])
            shifted = shifted << piece.at if piece.at else shifted
            if piece.part not in found and shifted.shape[1] == sizes[piece.part]:
                found[piece.part] = shifted
                continue
            if piece.part not in found:
                found[piece.part] = torch.zeros((len(raw), sizes[piece.part]), dtype=shifted.dtype)
            found[piece.part][:, piece.places(shifted.shape[1])] |= shifted
        begin += field.num_bytes
    return found


def join_fields(fields: Sequence[Field], numbers: Numbers) -> Tensor:
    """Return the bytes of numbers, the inverse of `split_fields`; numbers beyond the bits of a part become its ends."""
    dtypes, bits = _dtypes(fields), part_bits(fields)
    whole = {
        part: held if bits[part] in (8, 16) else held.clamp(0, (1 << bits[part]) - 1).to(dtypes[part])
        for part, held in numbers.items()
    }
    return torch.cat([field.join(whole) for field in fields], 1)


def part_bits(fields: Sequence[Field]) -> dict[str, int]:
    """Return how many bits the numbers of each part have."""
    found: dict[str, int] = {}
    for piece, _ in (one for field in fields for one in field.pieces()):
        found[piece.part] = max(found.get(piece.part, 0), piece.at + piece.bits)
    return found


def part_sizes(fields: Sequence[Field]) -> dict[str, int]:
    """Return how many numbers a block has of each part."""
    found: dict[str, int] = {}
    for piece, count in (one for field in fields for one in field.pieces()):
        found[piece.part] = max(found.get(piece.part, 0), piece.places(count).stop)
    return found


def _dtypes(fields: Sequence[Field]) -> dict[str, torch.dtype]:
    return {
        part: torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32
        for part, bits in part_bits(fields).items()
    }
