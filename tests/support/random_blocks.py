"""Random blocks of GGUF's types that ggml could have written."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.load.gguf.block_types import BlockType


def random_blocks(kind: BlockType, count: int, seed: int = 0) -> Tensor:
    """Return uint8 [count, bytes]; scales are any float16, also NaN."""
    raw = torch.randint(0, 256, (count, kind.num_bytes), generator=torch.Generator().manual_seed(seed))
    if kind.name == "TQ1_0":  # 243 of the 256 bytes, and of four digits in five every third
        digits = raw[:, :52] * 243 // 256
        digits[:, 48:] -= digits[:, 48:] % 3
        raw[:, :52] = (digits * 256 + 242) // 243
    return raw.to(torch.uint8)
