"""The smallest float type that holds given values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def smallest_exact(blocks: Iterable[Tensor]) -> str:
    """Return BF16, F16 or F32: the first that holds every value of the blocks exactly."""
    left = list(DTYPES)
    for block in blocks:
        values = block.float()
        left = [name for name in left if torch.equal(values.to(DTYPES[name]).float(), values)]
    return left[0] if left else "F32"
