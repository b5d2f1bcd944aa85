"""Error of each token's logits, which a mean over thousands of tokens would hide."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -1e4  # classes that code for half precision hides by such a value


def token_errors(expected: Tensor, got: Tensor) -> Tensor:
    """Return the relative error of each row [rows, classes] → float64 [rows], without the row's mean.

    A constant added to all logits of a row changes no softmax, so the mean is taken off.

    Infinite where a value is finite on one side only; classes that both sides hide do not count.
    """
    expected, got = expected.double(), got.double()
    counted = expected.isfinite() & (expected > MASKED)
    lost = (counted & ~got.isfinite()) | (~counted & got.isfinite() & (got > MASKED)) | got.isnan()
    count = counted.sum(-1, keepdim=True).clamp(min=1)

    def centred(rows: Tensor) -> Tensor:
        rows = rows.where(counted & got.isfinite(), 0.0)
        return (rows - rows.sum(-1, keepdim=True) / count).where(counted, 0.0)

    reference = centred(expected)
    difference = (centred(got) - reference).norm(dim=-1)
    relative = (difference / reference.norm(dim=-1)).where(difference > 0, 0.0)
    return relative.masked_fill(lost.any(-1), torch.inf)
