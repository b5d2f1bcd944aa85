"""Random operands of the groupwise operators, in the forms that checkpoints have."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.kernels.ops.bitpack import pack

# Group, bits (8: bytes), dtype of the scales (uint8: int8 of so few bits that they are packed), a minimum ("steps":
# of the scale).
Form = tuple[int, int, torch.dtype, bool | str]
FORMS: list[Form] = [
    (16, 4, torch.float32, False),
    (16, 8, torch.int8, False),
    (16, 2, torch.int8, True),
    (32, 4, torch.float16, False),
    (32, 4, torch.float16, True),
    (32, 4, torch.int8, True),
    (32, 4, torch.bfloat16, False),
    (32, 8, torch.float16, True),
    (64, 4, torch.float32, False),
    (128, 4, torch.float16, True),
    (320, 8, torch.float32, False),
    (16, 3, torch.int8, False),
    (16, 6, torch.int8, False),
    (32, 5, torch.float16, False),
    (32, 5, torch.uint8, True),
    (32, 4, torch.uint8, True),
    (16, 2, torch.uint8, True),
    (64, 4, torch.float16, "steps"),
    (128, 2, torch.bfloat16, "steps"),
    (16, 4, torch.float8_e4m3fn, False),
    (64, 6, torch.float32, False),
    (64, 2, torch.float16, True),
    (128, 3, torch.float16, False),
    (32, 3, torch.int8, False),
    (32, 3, torch.float16, True),
    (16, 3, torch.int8, True),
]
# Of up to 4 bits: codes that are integers minus a zero point, computed with without a table.
CONSECUTIVE: list[Form] = [
    (32, 4, torch.float16, False),
    (32, 4, torch.float16, True),
    (32, 4, torch.uint8, True),
    (16, 2, torch.uint8, True),
    (16, 3, torch.int8, False),
    (64, 4, torch.float16, "steps"),
    (64, 2, torch.float16, True),
    (128, 3, torch.float16, False),
]


def operands(form: Form, rows: int, columns: int) -> dict[str, Tensor]:
    """Return the tensors of a weight [rows, columns] by name; absent ones are left out."""
    group, bits, dtype, has_minimum = form
    rng = torch.Generator().manual_seed(rows * 7 + columns + group)
    made: dict[str, Tensor] = {}
    if bits == 8:
        made["codes"] = torch.randint(-128, 128, (rows, columns), generator=rng).to(torch.int8)
    else:
        made["codes"] = pack(torch.randint(0, 2**bits, (rows, columns), generator=rng).to(torch.uint8), bits)
        made["table"] = torch.randint(-8, 8, (1, 2**bits), generator=rng).float()
        if bits > 4 or form in CONSECUTIVE:
            zero = 0 if has_minimum else 2 ** (bits - 1)
            made["table"] = torch.arange(2.0**bits)[None] - zero
    sizes = (rows, columns // group)

    integers = dtype in (torch.int8, torch.uint8)

    def numbers() -> Tensor:
        if dtype == torch.uint8:
            return torch.randint(0, 64 if group == 32 else 16, sizes, generator=rng).to(torch.int8)
        if dtype == torch.int8:
            return torch.randint(-32, 63, sizes, generator=rng).to(torch.int8)
        return (torch.randn(sizes, generator=rng) / 64).to(dtype)

    kinds = 1 + (has_minimum is True)
    for name, super_name in (("scale", "super_scale"), ("minimum", "super_minimum"))[:kinds]:
        made[name] = numbers()
        if integers:
            made[super_name] = (torch.randn((rows, -(-columns // 256)), generator=rng) / 512).half()
    if has_minimum == "steps":
        made["minimum"] = torch.randint(-16, 1, sizes, generator=rng).to(torch.int8)
    if dtype == torch.float8_e4m3fn:
        made["super_scale"] = torch.rand((rows, 1), generator=rng) + 0.5
    return made
