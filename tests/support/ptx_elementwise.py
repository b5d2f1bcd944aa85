"""PTX of the integer, byte and half-precision instructions that the kernels write themselves, on Python integers."""

from __future__ import annotations

import re

import torch


def _lut(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for place in range(32):
        index = (a >> place & 1) * 4 + (b >> place & 1) * 2 + (c >> place & 1)
        found |= (table >> index & 1) << place
    return found


def _permute(a: int, b: int, selector: int) -> int:
    """`prmt.b32`: a nibble of the selector chooses one of eight bytes, its highest bit that byte's sign instead."""
    pool = a | b << 32
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = pool >> 8 * (nibble & 7) & 255
        found |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return found


def _multiply_add(a: int, b: int, c: int, dtype: torch.dtype) -> int:
    halves = [torch.tensor([x & 0xFFFF, x >> 16]).to(torch.int16).view(dtype).double() for x in (a, b, c)]
    low, high = (halves[0] * halves[1] + halves[2]).to(dtype).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def run(text: str, inputs: list[int], outputs: int) -> list[int]:
    """Return the output operands `$0` … of a block of PTX; `inputs` are those after them, 32 bits each."""
    registers: dict[str, int] = {f"${outputs + i}": value & 0xFFFFFFFF for i, value in enumerate(inputs)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.sub(r"[{}]\n|\n}", "\n", text[1:-1]).split(";"):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        if name == "mov.b32" and "{" in rest:
            low, high, source = re.findall(r"[$\w]+", rest)
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
            continue
        target, *operands = [part.strip() for part in rest.split(",")]
        given = [value(operand) for operand in operands]
        registers[target] = _computed(name, given)
    return [registers[f"${i}"] for i in range(outputs)]


def _computed(name: str, given: list[int]) -> int:
    match name:
        case "mov.b32":
            return given[0]
        case "and.b32":
            return given[0] & given[1]
        case "or.b32":
            return given[0] | given[1]
        case "xor.b32":
            return given[0] ^ given[1]
        case "shr.u32":
            return given[0] >> given[1]
        case "lop3.b32":
            return _lut(*given)
        case "prmt.b32":
            return _permute(*given)
        case "add.rn.f16x2":
            return _multiply_add(given[0], 0x3C003C00, given[1], torch.float16)
        case "fma.rn.bf16x2":
            return _multiply_add(*given, torch.bfloat16)
        case "fma.rn.f16x2":
            return _multiply_add(*given, torch.float16)
    raise NotImplementedError(name)
