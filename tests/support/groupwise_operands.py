"""Random operands of the groupwise operators, in the forms that checkpoints have."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.kernels.ops.bitpack import pack

# Group, bits (8: bytes), dtype of the scales, a minimum.
Form = tuple[int, int, torch.dtype, bool]
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
    sizes = (rows, columns // group)

    def numbers() -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-32, 63, sizes, generator=rng).to(torch.int8)
        return (torch.randn(sizes, generator=rng) / 64).to(dtype)

    for name, super_name in (("scale", "super_scale"), ("minimum", "super_minimum"))[: 1 + has_minimum]:
        made[name] = numbers()
        if dtype == torch.int8:
            made[super_name] = (torch.randn((rows, -(-columns // 256)), generator=rng) / 512).half()
    return made
