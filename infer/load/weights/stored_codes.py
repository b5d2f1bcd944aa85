"""Codes of a weight that its source has quantized, for formats that carry them over as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = Callable[[int, int], dict[str, Tensor]]


@dataclass(frozen=True)
class StoredCodes:
    """Codes of a weight [rows of outputs, columns], in the tensors of `kernels.ops.coded_weight`.

    `kind`: the source's name of the form (Q4_K, gptq); `rows(start, stop)`: the tensors of these rows, whole tables;
    `dtype`: to which the source's own reader rounds decoded weights; `experts`: the rows are those of one expert after
    another, whatever the order of the weight's dimensions; `order` int64 [columns]: where the column that each code
    belongs to lies in x, for codes sorted by group (act-order).
    `refused` is the reason why the codes can't be carried over; then `rows` may not be called.
    """

    kind: str
    shape: tuple[int, int]
    rows: Rows
    dtype: torch.dtype = torch.float32
    experts: bool = False
    order: Tensor | None = None
    refused: str = ""

    @classmethod
    def without(cls, kind: str, refused: str) -> StoredCodes:
        """Return codes of a weight without data, with the reason why they can't be carried over."""
        return cls(kind, (0, 0), lambda start, stop: {}, refused=refused)
