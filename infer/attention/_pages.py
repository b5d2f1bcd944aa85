"""Size and portable layout of a page of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ..spec import KV_DTYPES

__all__ = ["KV_DTYPES", "PageLayout", "Parts"]
_TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
SCALED = ("int8", "float8_e4m3fn")  # with a step for each token and head


class Parts(NamedTuple):
    """Views into pages: key, value [pages, kv_heads, page, head_dim]; of 8 bits their steps [pages, kv_heads, page]."""

    key: Tensor
    value: Tensor
    key_step: Tensor | None
    value_step: Tensor | None


class PageLayout(msgspec.Struct, frozen=True):
    """One layer's page: `page` tokens of `kv_heads` heads of `head_dim` numbers, keys and values."""

    kv_heads: int
    head_dim: int
    page: int
    dtype: str  # of KV_DTYPES

    @property
    def half(self) -> int:
        """Bytes of the keys alone, without steps."""
        return self.kv_heads * self.page * self.head_dim * _TORCH[self.dtype].itemsize

    @property
    def is_scaled(self) -> bool:
        return self.dtype in SCALED

    @property
    def num_bytes(self) -> int:
        steps = 2 * self.kv_heads * self.page * 4 if self.is_scaled else 0
        return 2 * self.half + steps

    def parts(self, pages: Tensor) -> Parts:
        """Return views of `pages`, uint8 [count, at least num_bytes], dense within a page."""
        shape = (len(pages), self.kv_heads, self.page)
        kind = _TORCH[self.dtype]

        def cut(start: int, size: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return pages[:, start : start + size].view(dtype).unflatten(1, shape[1:])

        key = cut(0, self.half, kind, *shape, self.head_dim)
        value = cut(self.half, self.half, kind, *shape, self.head_dim)
        if not self.is_scaled:
            return Parts(key, value, None, None)
        steps = self.kv_heads * self.page * 4
        first = cut(2 * self.half, steps, torch.float32, *shape)
        return Parts(key, value, first, cut(2 * self.half + steps, steps, torch.float32, *shape))
