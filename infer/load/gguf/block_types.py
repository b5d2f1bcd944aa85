"""Types of GGUF tensors: floats, and blocks of codes with their scales; one description of each.

From a description follow the split of blocks into codes, their join, and their decoding to float32. Layouts as in
ggml's `ggml-common.h`; decoded values are bit-equal to those of ggml's `dequantize_row_*`. Blocks are uint8 [n, bytes
of a block]; parts of n blocks are codes [n, weights of a block], scale [n, groups], and where present minimum [n,
groups], super_scale and super_minimum [n, 1], in the dtypes of `kernels.ops.coded_weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.ops.bitpack import pack
from .block_fields import Field, Piece, TernaryDigits, Words, join_fields, part_sizes, split_fields
from .codebooks import ShiftedPoints, SignedPoints

Parts = dict[str, Tensor]
SUPER = 256  # weights of a block of the K types


class Meaning(NamedTuple):
    """Values of a part from the numbers that are stored, and back."""

    values: Callable[[Tensor], Tensor]
    numbers: Callable[[Tensor], Tensor]


def _float16_numbers(values: Tensor) -> Tensor:
    return values.to(torch.float16).contiguous().view(torch.int16)


def _exponent(scale: Tensor) -> Tensor:
    return (torch.frexp(scale.float())[1].to(torch.int32) + 127).clamp(0, 255)


FLOAT16 = Meaning(lambda stored: stored.view(torch.float16), _float16_numbers)
SUBTRACTED = Meaning(lambda stored: -stored.view(torch.float16), lambda values: _float16_numbers(-values))
UNSIGNED = Meaning(lambda stored: stored.to(torch.int8), lambda values: values)
INT8 = Meaning(
    lambda stored: stored.contiguous().view(torch.int8),
    lambda values: values.to(torch.int8).contiguous().view(torch.uint8),
)
SIX_BITS = Meaning(lambda stored: stored.to(torch.int8) - 32, lambda values: values.to(torch.int16) + 32)
ODD = Meaning(lambda stored: (2 * stored + 1).to(torch.int8), lambda values: values >> 1)
# Half of 2^(e - 127), as the table of its codes is doubled.
EXPONENT = Meaning(
    lambda stored: torch.ldexp(torch.ones(stored.shape), stored.int() - 128).to(torch.bfloat16), _exponent
)


@dataclass(frozen=True)
class BlockType:
    """One type, `number` in files: blocks of `block` weights.

    `dtype` is that of the values read; those of a type without `fields` are stored in it. Codes are indices into
    `values`, and without these int8; `points` makes them of indices into a codebook. `meanings`: of the other parts.
    """

    number: int
    name: str
    block: int
    dtype: torch.dtype = torch.float32
    fields: tuple[Field, ...] = ()
    values: range | tuple[float, ...] = ()
    meanings: dict[str, Meaning] = field(default_factory=dict)
    points: SignedPoints | ShiftedPoints | None = None

    @property
    def holds_codes(self) -> bool:
        return bool(self.fields)

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return sum(one.num_bytes for one in self.fields) if self.fields else self.dtype.itemsize

    @property
    def table(self) -> tuple[float, ...]:
        """Values of the codes, empty for integers."""
        return tuple(map(float, self.values))

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return self.block // part_sizes(self.fields)["scale"]

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` weights, a multiple of the block."""
        return width // self.block * self.num_bytes

    def split(self, raw: Tensor) -> Parts:
        """Return the parts of blocks; values are those of the file."""
        numbers = split_fields(self.fields, raw)
        parts = {name: meaning.values(numbers[name]) for name, meaning in self.meanings.items()}
        if self.points is not None:
            return {"codes": self.points.split(numbers), **parts}
        return {"codes": numbers["codes"] if self.values else INT8.values(numbers["codes"]), **parts}

    def join(self, parts: Parts) -> Tensor:
        """Return the blocks of parts, the inverse of `split`; scales are rounded, what is out of range is cut."""
        codes = parts["codes"]
        numbers = {name: meaning.numbers(parts[name]) for name, meaning in self.meanings.items()}
        if self.points is not None:
            return join_fields(self.fields, {**self.points.join(codes), **numbers})
        return join_fields(self.fields, {"codes": codes if self.values else INT8.numbers(codes), **numbers})

    def decode(self, raw: Tensor) -> Tensor:
        """Return the weights of blocks, float32 [n, `block`]."""
        if not self.holds_codes:
            return raw.contiguous().view(self.dtype).float()
        parts = self.split(raw)
        scale, minimum = parts["scale"].float(), parts.get("minimum")
        if "super_scale" in parts:
            scale = parts["super_scale"].float() * scale
        weights = self._looked_up(parts["codes"]).reshape(*scale.shape, -1).mul_(scale[:, :, None])
        if minimum is not None:
            least = minimum.float()
            if "super_minimum" in parts:
                least = parts["super_minimum"].float() * least
            weights.add_(least[:, :, None])
        return weights.flatten(1)

    def _looked_up(self, codes: Tensor) -> Tensor:
        if isinstance(self.values, tuple):
            return torch.tensor(self.values)[codes.int()] if self.values else codes.float()
        values = codes.float()
        if self.values.step != 1:
            values.mul_(self.values.step)
        return values.add_(self.values.start) if self.values.start else values

    def rows(self, raw: Tensor, count: int) -> Parts:
        """Return the tensors of `kernels.ops.coded_weight` of `count` rows, which the blocks `raw` are."""
        parts = {name: part.reshape(count, -1) for name, part in self.split(raw).items()}
        if not self.values:
            return parts
        bits = len(self.values).bit_length() - 1
        table = torch.tensor([self.table], dtype=torch.float32)
        return {**parts, "codes": pack(parts["codes"].contiguous(), bits), "table": table}


def _half(part: str) -> Words:
    return Words(1, 2, (Piece(part, 16),))


def _bits(part: str, count: int, bits: int, run: int = 1, at: int = 0) -> Words:
    """Return `bits` of `count` numbers, each `run` bytes filled from their lowest bits on."""
    times = 8 // bits
    return Words(count // times, 1, (Piece(part, bits, times, at),), run)


def _blocks(
    number: int,
    name: str,
    values: range | tuple[float, ...],
    meanings: dict[str, Meaning],
    *fields: Field,
    points: SignedPoints | ShiftedPoints | None = None,
) -> BlockType:
    """Return a type of blocks whose bytes are `fields`."""
    held = part_sizes(fields)
    block = held["codes"] if points is None else SUPER
    return BlockType(number, name, block, torch.float32, fields, values, meanings, points)


def _both_signs(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the levels with either sign, ascending."""
    return (*(-level for level in reversed(levels)), *levels)


_SCALE, _MINIMUM, _SUPER_SCALE = _half("scale"), _half("minimum"), _half("super_scale")
_NIBBLES = _bits("codes", 32, 4, run=16)
# 8 scales and 8 minima of 6 bits: the highest two bits of the last four lie above the first four.
_PAIRS = (
    *(_SUPER_SCALE, _half("super_minimum")),
    Words(4, 1, (Piece("scale", 6), Piece("scale", 2, at=4, start=4))),
    Words(4, 1, (Piece("minimum", 6), Piece("minimum", 2, at=4, start=4))),
    Words(4, 1, (Piece("scale", 4, start=4), Piece("minimum", 4, start=4))),
)
_FLOAT = {"scale": FLOAT16}
_FLOATS = {"scale": FLOAT16, "minimum": FLOAT16}
_STEPS = {"scale": UNSIGNED, "super_scale": FLOAT16, "minimum": UNSIGNED, "super_minimum": SUBTRACTED}
_SIX_BIT_STEPS = {"scale": SIX_BITS, "super_scale": FLOAT16}
_ODD_STEPS = {"scale": ODD, "super_scale": FLOAT16}
# 4-bit floats, doubled to be whole.
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
_IQ4 = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
# Six values take three bits; the two that no code names keep the rounding of tables to int8 exact.
_TWO_BITS = (*_both_signs((1.0, 3.125, 5.375)), 0.0, 15.875)
_ONE_BIT = (*_both_signs((0.125, 0.875, 1.125)), 0.0, 0.0)
_THREE_BITS = _both_signs((1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5))

_TYPES = (
    BlockType(0, "F32", 1),
    BlockType(1, "F16", 1, torch.float16),
    BlockType(30, "BF16", 1, torch.bfloat16),
    _blocks(2, "Q4_0", range(-8, 8), _FLOAT, _SCALE, _NIBBLES),
    _blocks(3, "Q4_1", range(16), _FLOATS, _SCALE, _MINIMUM, _NIBBLES),
    _blocks(6, "Q5_0", range(-16, 16), _FLOAT, _SCALE, _bits("codes", 32, 1, at=4), _NIBBLES),
    _blocks(7, "Q5_1", range(32), _FLOATS, _SCALE, _MINIMUM, _bits("codes", 32, 1, at=4), _NIBBLES),
    _blocks(8, "Q8_0", (), _FLOAT, _SCALE, _bits("codes", 32, 8)),
    _blocks(
        *(10, "Q2_K", range(4), _STEPS),
        Words(16, 1, (Piece("scale", 4), Piece("minimum", 4))),
        *(_bits("codes", 256, 2, run=32), _SUPER_SCALE, _half("super_minimum")),
    ),
    _blocks(
        *(11, "Q3_K", range(-4, 4), _SIX_BIT_STEPS),
        *(_bits("codes", 256, 1, run=32, at=2), _bits("codes", 256, 2, run=32)),
        *(_bits("scale", 16, 4, run=8), _bits("scale", 16, 2, run=4, at=4), _SUPER_SCALE),
    ),
    _blocks(12, "Q4_K", range(16), _STEPS, *_PAIRS, _bits("codes", 256, 4, run=32)),
    _blocks(
        *(13, "Q5_K", range(32), _STEPS, *_PAIRS),
        *(_bits("codes", 256, 1, run=32, at=4), _bits("codes", 256, 4, run=32)),
    ),
    _blocks(
        *(14, "Q6_K", range(-32, 32), {"scale": INT8, "super_scale": FLOAT16}),
        *(_bits("codes", 256, 4, run=64), _bits("codes", 256, 2, run=32, at=4)),
        *(_bits("scale", 16, 8), _SUPER_SCALE),
    ),
    _blocks(20, "IQ4_NL", _IQ4, _FLOAT, _SCALE, _NIBBLES),
    _blocks(
        *(23, "IQ4_XS", _IQ4, _SIX_BIT_STEPS),
        *(_SUPER_SCALE, _bits("scale", 8, 2, at=4), _bits("scale", 8, 4), _bits("codes", 256, 4, run=16)),
    ),
    _blocks(39, "MXFP4", _E2M1, {"scale": EXPONENT}, _bits("scale", 1, 8), _NIBBLES),
    _blocks(
        *(16, "IQ2_XXS", _TWO_BITS, _ODD_STEPS, _SUPER_SCALE),
        Words(8, 8, (Piece("index", 8, 4), Piece("signs", 7, 4), Piece("scale", 4))),
        points=SignedPoints("IQ2_XXS", even=True),
    ),
    _blocks(
        *(17, "IQ2_XS", _TWO_BITS, _ODD_STEPS, _SUPER_SCALE),
        *(Words(32, 2, (Piece("index", 9), Piece("signs", 7))), _bits("scale", 16, 4)),
        points=SignedPoints("IQ2_XS", even=True),
    ),
    _blocks(
        *(18, "IQ3_XXS", _THREE_BITS, _ODD_STEPS, _SUPER_SCALE, _bits("index", 64, 8)),
        Words(8, 4, (Piece("signs", 7, 4), Piece("scale", 4))),
        points=SignedPoints("IQ3_XXS", even=True),
    ),
    _blocks(
        *(19, "IQ1_S", _ONE_BIT, _ODD_STEPS, _SUPER_SCALE, _bits("index", 32, 8)),
        Words(8, 2, (Piece("index", 3, 4, at=8), Piece("scale", 3), Piece("down", 1))),
        points=ShiftedPoints("IQ1_S", shared=4),
    ),
    _blocks(
        *(21, "IQ3_S", range(-15, 16, 2), _ODD_STEPS, _SUPER_SCALE, _bits("index", 64, 8)),
        *(_bits("index", 64, 1, at=8), _bits("signs", 32, 8), _bits("scale", 8, 4)),
        points=SignedPoints("IQ3_S"),
    ),
    _blocks(
        *(22, "IQ2_S", _TWO_BITS, _ODD_STEPS, _SUPER_SCALE, _bits("index", 32, 8)),
        *(_bits("signs", 32, 8), _bits("index", 32, 2, at=8), _bits("scale", 16, 4)),
        points=SignedPoints("IQ2_S"),
    ),
    _blocks(
        *(29, "IQ1_M", _ONE_BIT, _ODD_STEPS, _bits("index", 32, 8)),
        Words(
            *(16, 1),
            tuple(
                Piece(part, bits, at=at, start=start, step=2)
                for start in range(2)
                for part, bits, at in (("index", 3, 8), ("down", 1, 0))
            ),
        ),
        # The float16 of the block lies in the highest four bits of four words.
        *(
            Words(1, 2, (Piece("scale", 3, 4, start=4 * i), Piece("super_scale", 4, at=4 * i)))
            for i in range(4)
        ),
        points=ShiftedPoints("IQ1_S", shared=1),
    ),
    _blocks(
        *(34, "TQ1_0", range(-1, 3), _FLOAT, TernaryDigits("codes", 32, 5)),
        *(TernaryDigits("codes", 16, 5, start=160), TernaryDigits("codes", 4, 4, start=240), _SCALE),
    ),
    _blocks(35, "TQ2_0", range(-1, 3), _FLOAT, _bits("codes", 256, 2, run=32), _SCALE),
)
BLOCK_TYPES = {kind.name: kind for kind in _TYPES}
# Types that are named in a refusal: those of activations, integers, those that ggml has dropped, and NVFP4, whose files
# hold one more scale for each tensor.
UNREAD_TYPES = {
    **{4: "Q4_2 (dropped by ggml)", 5: "Q4_3 (dropped by ggml)", 9: "Q8_1", 15: "Q8_K"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"},
}
