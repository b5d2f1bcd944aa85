"""Random blocks of GGUF's types that ggml could have written."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.load.gguf.block_types import BlockType

# Where blocks have the float16 of their scales, and behind it that of their minima, if not at the start.
_HALVES = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"Q4_1": (0, 2), "Q5_1": (0, 2), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "IQ1_M": ()},
}


def random_blocks(kind: BlockType, count: int, seed: int = 0) -> Tensor:
    """Return uint8 [count, bytes]; scales are any float16, also NaN."""
    raw = torch.randint(0, 256, (count, kind.num_bytes), generator=torch.Generator().manual_seed(seed))
    if kind.name == "TQ1_0":  # 243 of the 256 bytes, and of four digits in five every third
        digits = raw[:, :52] * 243 // 256
        digits[:, 48:] -= digits[:, 48:] % 3
        raw[:, :52] = (digits * 256 + 242) // 243
    return raw.to(torch.uint8)


def moderate_blocks(kind: BlockType, count: int, size: float = 1.0, seed: int = 0) -> Tensor:
    """Return blocks like `random_blocks` whose scales are numbers of about `size`, minima beside them one more."""
    found = random_blocks(kind, count, seed)
    rng = torch.Generator().manual_seed(seed)
    for index, place in enumerate(_HALVES.get(kind.name, (0,))):
        values = torch.randn((count, 1), generator=rng) * size + index
        found[:, place : place + 2] = values.half().view(torch.uint8)
    if kind.name == "MXFP4":
        found[:, 0] = found[:, 0] % 40 + 100
    if kind.name == "IQ1_M":  # the bits of its float16 lie in the high halves of four words
        whole = torch.full((count, 1), size).half().view(torch.int16).long() & 0xFFFF
        found[:, 49::2] = (
            found[:, 49::2] & 15 | (whole >> torch.tensor([0, 4, 8, 12]) & 15).to(torch.uint8) << 4
        )
    return found
