"""Functions of single numbers in the attention kernels: logits, ALiBi, int8 to 16 bits, float8 e4m3 both ways."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logits(scores: tl.tensor, scale: tl.tensor, cap: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    if SOFTCAP:  # cap * tanh(scores * scale / 2), by one exponential that may overflow
        return cap - 2 * cap / (tl.exp2(scores * scale) + 1)
    return scores * scale


@triton.jit
def _to_bfloat(x: tl.tensor) -> tl.tensor:
    """Return the nearest bfloat16, halves to even, of finite float32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def alibi(slope: tl.tensor, j: tl.tensor, position: tl.tensor, ROUNDED: tl.constexpr) -> tl.tensor:
    """Return the bias [R, KEYS] of keys j, 0 at a row's own position."""
    if ROUNDED:
        at = _to_bfloat(slope[:, None] * _to_bfloat(j.to(tl.float32))[None])
        return at - _to_bfloat(slope * _to_bfloat(position.to(tl.float32)))[:, None]
    return slope[:, None] * (j[None] - position[:, None]).to(tl.float32)


# Four int8 in a word → four numbers of 16 bits, exact. float16: the byte plus 128 under the exponent of 1024. bfloat16
# has seven bits of a fraction: the sign bit, which is worth 128, is taken apart and makes 256 of the exponent of 128.
BYTES_TO_F16 = """{
.reg .b32 b, m;
xor.b32 b, $2, 0x80808080;
mov.b32 m, 0xe480e480;
prmt.b32 $0, b, 0x64646464, 0x4140;
prmt.b32 $1, b, 0x64646464, 0x4342;
add.rn.f16x2 $0, $0, m;
add.rn.f16x2 $1, $1, m;
}"""
BYTES_TO_BF16 = """{
.reg .b32 p, q, s, one;
mov.b32 one, 0xbf80bf80;
prmt.b32 p, $2, 0x43434343, 0x4140;
prmt.b32 q, $2, 0x43434343, 0x4342;
and.b32 s, p, 0x43804380;
and.b32 p, p, 0x437f437f;
fma.rn.bf16x2 $0, s, one, p;
and.b32 s, q, 0x43804380;
and.b32 q, q, 0x437f437f;
fma.rn.bf16x2 $1, s, one, q;
}"""
# Four float8 e4m3 in a word → four numbers of 16 bits, exact, on every architecture: exponent and fraction under the
# sign, times the power of two between the biases (2**8, 2**120). No NaN: a cache has it in its steps.
_FLOAT8_PTX = """{
.reg .b32 p, q, s, m, zero;
mov.b32 m, FACTOR;
mov.b32 zero, 0x80008000;
prmt.b32 p, $2, 0, 0x1404;
prmt.b32 q, $2, 0, 0x3424;
and.b32 s, p, 0x80008000;
and.b32 p, p, 0x7f007f00;
shr.u32 p, p, SHIFT;
or.b32 p, p, s;
fma.rn.TYPE $0, p, m, zero;
and.b32 s, q, 0x80008000;
and.b32 q, q, 0x7f007f00;
shr.u32 q, q, SHIFT;
or.b32 q, q, s;
fma.rn.TYPE $1, q, m, zero;
}"""


def _float8_to(kind: str, shift: int, factor: str) -> str:
    """Return the instructions for pairs of `kind`, whose exponent lies `shift` bits below float8's under the sign."""
    return _FLOAT8_PTX.replace("TYPE", kind).replace("SHIFT", str(shift)).replace("FACTOR", factor)


FLOAT8_TO_F16 = _float8_to("f16x2", 1, "0x5c005c00")
FLOAT8_TO_BF16 = _float8_to("bf16x2", 4, "0x7b807b80")
_BYTES_TO_F16, _BYTES_TO_BF16 = tl.constexpr(BYTES_TO_F16), tl.constexpr(BYTES_TO_BF16)
_FLOAT8_TO_F16, _FLOAT8_TO_BF16 = tl.constexpr(FLOAT8_TO_F16), tl.constexpr(FLOAT8_TO_BF16)
_SCALE = tl.constexpr(2.0**120)  # between the exponents of float8 e4m3 and of float32
_NORMAL = tl.constexpr(2.0**-6)  # the least of float8 e4m3 with all bits of its fraction
_STEPS = tl.constexpr(2.0**9)  # below it, numbers of 1
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def from_float8(code: tl.tensor) -> tl.tensor:
    """Convert finite float8 e4m3 bytes to float32, exactly."""
    byte = code.to(tl.int32)
    bits = ((byte & 128) << 24) | ((byte & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * _SCALE


@triton.jit
def to_float8(x: tl.tensor) -> tl.tensor:
    """Convert float32 to float8 e4m3 bytes, rounding halves to even and saturating at ±448; NaN gives any value."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    small = ((size * _STEPS + _ROUNDER) - _ROUNDER).to(tl.int32)
    code = tl.where(size < _NORMAL, small, normal)
    return (code & 127 | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def in_type_of(like: tl.tensor, x: tl.tensor, PURE: tl.constexpr, ASSEMBLY: tl.constexpr) -> tl.tensor:
    """Convert keys or values to the type that `like` points to.

    Not PURE: in the layout of the load. Values, which a product reads across their bytes, are then converted once on
    the way to shared memory, not read from there byte by byte.
    """
    if ASSEMBLY and x.dtype == tl.int8 and like.dtype.element_ty == tl.float16:
        return tl.inline_asm_elementwise(_BYTES_TO_F16, "=&r,=&r,r", [x], tl.float16, is_pure=PURE, pack=4)
    if ASSEMBLY and x.dtype == tl.int8 and like.dtype.element_ty == tl.bfloat16:
        return tl.inline_asm_elementwise(_BYTES_TO_BF16, "=&r,=&r,r", [x], tl.bfloat16, is_pure=PURE, pack=4)
    if ASSEMBLY and x.dtype == tl.uint8 and like.dtype.element_ty == tl.float16:
        return tl.inline_asm_elementwise(_FLOAT8_TO_F16, "=&r,=&r,r", [x], tl.float16, is_pure=PURE, pack=4)
    if ASSEMBLY and x.dtype == tl.uint8 and like.dtype.element_ty == tl.bfloat16:
        return tl.inline_asm_elementwise(_FLOAT8_TO_BF16, "=&r,=&r,r", [x], tl.bfloat16, is_pure=PURE, pack=4)
    if x.dtype == tl.uint8:
        return from_float8(x).to(like.dtype.element_ty)
    return x.to(like.dtype.element_ty)
