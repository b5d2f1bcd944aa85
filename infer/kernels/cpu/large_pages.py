"""Memory for weights that are read together, in the order of their use and in large pages where the system has them.

A decode step reads every weight once, each thread in several streams. In pages of 4 KiB, which is what small tensors
get one by one, it waits for addresses to be translated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 64 << 20  # bytes; the system backs with memory what is written of it
ALONE = 32 << 20  # from here on an allocation has pages of its own, and who fills it asks for large ones
ALIGNMENT = 64


class LargePages:
    """Keeps tensors in blocks, each a storage of its own."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._used = 0

    def keep(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate parts [n, …] of one dtype in large pages; a single large part is returned as it is."""
        size = sum(part.nbytes for part in parts)
        if not size or (len(parts) == 1 and size >= ALONE):
            return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        start = self._used + -(self._block.ctypes.data + self._used) % ALIGNMENT
        if start + size > self._block.nbytes:
            self._block = np.empty(max(BLOCK, size + ALIGNMENT), np.uint8)  # numpy asks for large pages
            start = -self._block.ctypes.data % ALIGNMENT
        self._used = start + size
        memory = torch.from_numpy(self._block[start : self._used]).view(parts[0].dtype)
        kept = memory.view(sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return torch.cat(list(parts), out=kept)
