"""Words of eight 4-bit codes → eight numbers of 16 bits in the registers of a tensor-core fragment.

PTX, made here for each of the two types. Codes of a uniform table: a mask puts two of them under the exponent of 128
(bfloat16) or 1024 (float16), one multiply-add takes that off: 11 instructions for eight weights. Any other table: four
byte permutations find the low and the high byte of four codes in both halves of the table, two choose the half, two
put the bytes together: 21 instructions. With `scaled` each pair is then multiplied by the scale of its row.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Operands: $0 … $7 results, $8 the word, then `minus` of a uniform table or the 8 words of the planes, then the scales.
_OUTPUTS = ",".join(["=&h"] * 8)
_MAGIC = {"bf16": "0x43004300", "f16": "0x64006400"}
_ONE = {"bf16": "0x3f803f80", "f16": "0x3c003c00"}


def _finish(half: str, register: str, pair: int, scaled: bool, first: int) -> str:
    times = f"fma.rn.{half}x2 {register}, {register}, ${first + pair % 2}, zero;\n" if scaled else ""
    return f"{times}mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, {register};\n"


def uniform_assembly(half: str, scaled: bool) -> str:
    """Return the PTX for a uniform table; `half` is `bf16` or `f16`."""
    text = "{\n.reg .b32 r, s, one, zero;\n" + f"mov.b32 one, {_ONE[half]};\nmov.b32 zero, 0x80008000;\n"
    for pair in range(4):
        word = "$8" if pair == 0 else "s"
        text += "" if pair == 0 else f"shr.u32 s, $8, {4 * pair};\n"
        text += f"lop3.b32 r, {word}, 0x000f000f, {_MAGIC[half]}, 0xea;\n"
        text += f"fma.rn.{half}x2 r, r, one, $9;\n" + _finish(half, "r", pair, scaled, 10)
    return text + "}"


def table_assembly(half: str, scaled: bool) -> str:
    """Return the PTX for any table."""
    text = "{\n.reg .b32 c, h, low, high, p, q, zero;\nmov.b32 zero, 0x80008000;\n"
    # Three bits select within half of the table; the fourth, moved to bit 2 of its nibble, chooses the half.
    text += "and.b32 c, $8, 0x77777777;\nshr.u32 h, $8, 1;\nlop3.b32 h, h, 0x44444444, 0x32103210, 0xea;\n"
    for quad in range(2):
        for name, first in (("low", 9), ("high", 13)):
            text += f"prmt.b32 p, ${first}, ${first + 1}, c;\nprmt.b32 q, ${first + 2}, ${first + 3}, c;\n"
            text += f"prmt.b32 {name}, p, q, h;\n"
        text += "prmt.b32 p, low, high, 0x5140;\nprmt.b32 q, low, high, 0x7362;\n"
        text += _finish(half, "p", 2 * quad, scaled, 17) + _finish(half, "q", 2 * quad + 1, scaled, 17)
        text += "shr.u32 c, c, 16;\nshr.u32 h, h, 16;\n" if quad == 0 else ""
    return text + "}"


_UNIFORM_BF16 = tl.constexpr(uniform_assembly("bf16", False))
_UNIFORM_BF16_SCALED = tl.constexpr(uniform_assembly("bf16", True))
_UNIFORM_F16 = tl.constexpr(uniform_assembly("f16", False))
_UNIFORM_F16_SCALED = tl.constexpr(uniform_assembly("f16", True))
_TABLE_BF16 = tl.constexpr(table_assembly("bf16", False))
_TABLE_BF16_SCALED = tl.constexpr(table_assembly("bf16", True))
_TABLE_F16 = tl.constexpr(table_assembly("f16", False))
_TABLE_F16_SCALED = tl.constexpr(table_assembly("f16", True))
_WORDS_2 = tl.constexpr(f"{_OUTPUTS},r,r")
_WORDS_4 = tl.constexpr(f"{_OUTPUTS},r,r,r,r")
_WORDS_9 = tl.constexpr(f"{_OUTPUTS}{',r' * 9}")
_WORDS_11 = tl.constexpr(f"{_OUTPUTS}{',r' * 11}")


@triton.jit
def planes_of(
    like: tl.tensor, planes_ptr: tl.tensor, block: tl.tensor, UNIFORM: tl.constexpr, ASSEMBLY: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the eight byte-plane words of the tables of `block` [T], each [T, 1, 1]; of uniform ones `minus`."""
    if not ASSEMBLY:
        zero = (block * 0)[:, None, None]
        return zero, zero, zero, zero, zero, zero, zero, zero
    at = planes_ptr + block * 18 + (0 if like.dtype.element_ty == tl.bfloat16 else 9)
    if UNIFORM:
        minus = tl.load(at + 8)[:, None, None]
        return minus, minus, minus, minus, minus, minus, minus, minus
    return (
        tl.load(at)[:, None, None],
        tl.load(at + 1)[:, None, None],
        tl.load(at + 2)[:, None, None],
        tl.load(at + 3)[:, None, None],
        tl.load(at + 4)[:, None, None],
        tl.load(at + 5)[:, None, None],
        tl.load(at + 6)[:, None, None],
        tl.load(at + 7)[:, None, None],
    )


@triton.jit
def _pair(scale: tl.tensor, BF16: tl.constexpr) -> tl.tensor:
    """Convert small integers to words that hold the number twice in 16 bits, exactly."""
    text: tl.constexpr = "prmt.b32 $0, $1, $1, 0x3232;" if BF16 else "cvt.rn.f16x2.f32 $0, $1, $1;"
    return tl.inline_asm_elementwise(
        text, "=r,r", [scale.to(tl.float32)], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _entry(
    planes_ptr: tl.tensor,
    block: tl.tensor,
    word: tl.tensor,
    scale: tl.tensor,
    PLACE: tl.constexpr,
    BF16: tl.constexpr,
    SCALED: tl.constexpr,
) -> tl.tensor:
    """Decode one code of each word in plain Triton, for the interpreter; `planes_ptr` is of bytes."""
    TYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    at = planes_ptr + block[:, None, None] * 72 + (0 if BF16 else 36) + ((word >> PLACE) & 15)
    bits = tl.load(at).to(tl.int32) | (tl.load(at + 16).to(tl.int32) << 8)
    value = bits.to(tl.int16).to(TYPE, bitcast=True)
    return value * scale.to(TYPE) if SCALED else value


@triton.jit
def _entries(
    planes_ptr: tl.tensor,
    block: tl.tensor,
    word: tl.tensor,
    s0: tl.tensor,
    s1: tl.tensor,
    BF16: tl.constexpr,
    UNIFORM: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Decode the eight codes of each word in plain Triton, in the order of `_assembly`."""
    FAR: tl.constexpr = 16 if UNIFORM else 4  # bits from the first code of a pair to the second
    NEXT: tl.constexpr = 4 if UNIFORM else 8
    return (
        _entry(planes_ptr, block, word, s0, 0, BF16, SCALED),
        _entry(planes_ptr, block, word, s0, FAR, BF16, SCALED),
        _entry(planes_ptr, block, word, s1, NEXT, BF16, SCALED),
        _entry(planes_ptr, block, word, s1, NEXT + FAR, BF16, SCALED),
        _entry(planes_ptr, block, word, s0, 2 * NEXT, BF16, SCALED),
        _entry(planes_ptr, block, word, s0, 2 * NEXT + FAR, BF16, SCALED),
        _entry(planes_ptr, block, word, s1, 3 * NEXT, BF16, SCALED),
        _entry(planes_ptr, block, word, s1, 3 * NEXT + FAR, BF16, SCALED),
    )


@triton.jit
def _inline(
    like: tl.tensor, text: tl.constexpr, constraints: tl.constexpr, operands: tl.tuple
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Run PTX that makes eight values in the type that `like` points to of each word."""
    return tl.inline_asm_elementwise(
        text, constraints, operands, (like.dtype.element_ty,) * 8, is_pure=True, pack=1
    )


@triton.jit
def _assembly(
    like: tl.tensor,
    word: tl.tensor,
    planes: tl.tuple,
    s0: tl.tensor,
    s1: tl.tensor,
    UNIFORM: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Decode the eight codes of each word by PTX: pairs of columns of rows g and g + 8 in turn."""
    BF16: tl.constexpr = like.dtype.element_ty == tl.bfloat16
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    if SCALED and UNIFORM:
        scaled_line: tl.constexpr = _UNIFORM_BF16_SCALED if BF16 else _UNIFORM_F16_SCALED
        return _inline(like, scaled_line, _WORDS_4, [word, p0, _pair(s0, BF16), _pair(s1, BF16)])
    if SCALED:
        scaled_table: tl.constexpr = _TABLE_BF16_SCALED if BF16 else _TABLE_F16_SCALED
        given = [word, p0, p1, p2, p3, p4, p5, p6, p7, _pair(s0, BF16), _pair(s1, BF16)]
        return _inline(like, scaled_table, _WORDS_11, given)
    if UNIFORM:
        line: tl.constexpr = _UNIFORM_BF16 if BF16 else _UNIFORM_F16
        return _inline(like, line, _WORDS_2, [word, p0])
    table: tl.constexpr = _TABLE_BF16 if BF16 else _TABLE_F16
    return _inline(like, table, _WORDS_9, [word, p0, p1, p2, p3, p4, p5, p6, p7])


@triton.jit
def decode(
    like: tl.tensor,
    word: tl.tensor,
    planes_ptr: tl.tensor,
    block: tl.tensor,
    planes: tl.tuple,
    s0: tl.tensor,
    s1: tl.tensor,
    UNIFORM: tl.constexpr,
    SCALED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:
    """Decode words [T, 32, 4] of one group of columns to the tile [16 T, 64] of the weight, in the type of `like`.

    `planes` are from `planes_of`. s0, s1 [T, 32, 1] are the group's scales of rows g and g + 8 of each lane; they
    multiply the tile if SCALED.
    """
    if ASSEMBLY:
        a, b, c, d, e, f, g, h = _assembly(like, word, planes, s0, s1, UNIFORM, SCALED)
    else:
        BF16: tl.constexpr = like.dtype.element_ty == tl.bfloat16
        a, b, c, d, e, f, g, h = _entries(planes_ptr, block, word, s0, s1, BF16, UNIFORM, SCALED)
    # [T, 32, slice, pair, row half, column half] → row: tile, half, g; column: slice, half, t, pair
    tile = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    T: tl.constexpr = word.shape[0]
    tile = tl.permute(tl.reshape(tile, [T, 8, 4, 4, 2, 2, 2]), (0, 5, 1, 3, 6, 2, 4))
    tile = tl.reshape(tile, [T * 16, 64])
    if ASSEMBLY:
        # Does nothing, but is opaque: Triton before 3.8 halves the vectors of an operand whose history has a join,
        # and its registers would no longer be those of the fragment.
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], like.dtype.element_ty, is_pure=False, pack=2
        )
    return tile
