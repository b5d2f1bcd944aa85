"""Error of each token's logits, which a mean over thousands of tokens would hide."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -1e4  # classes that code for half precision hides by such a value
CHUNK = 1 << 18  # values widened to float64 at a time, in the cache of a core


def token_errors(expected: Tensor, got: Tensor) -> Tensor:
    """Return the relative error of each row [rows, classes] → float64 [rows], without the row's mean.

    A constant added to all logits of a row changes no softmax, so the mean is taken off.

    Infinite where a value is finite on one side only; classes that both sides hide do not count.
    """
    rows = max(CHUNK // max(expected.shape[-1], 1), 1)
    pairs = zip(expected.split(rows), got.split(rows), strict=True)
    return torch.cat([_errors(one.double(), other.double()) for one, other in pairs])


def _errors(expected: Tensor, got: Tensor) -> Tensor:
    plain = expected.numel() > 0 and bool(expected.amin() > MASKED)
    if plain and bool((expected.sum() + got.sum()).isfinite()):  # nothing is hidden or lost
        reference = expected - expected.mean(-1, keepdim=True)
        return _relative(reference, got - got.mean(-1, keepdim=True))
    counted = expected.isfinite() & (expected > MASKED)
    lost = (counted & ~got.isfinite()) | (~counted & got.isfinite() & (got > MASKED)) | got.isnan()
    count = counted.sum(-1, keepdim=True).clamp(min=1)

    def centred(rows: Tensor) -> Tensor:
        rows = rows.where(counted & got.isfinite(), 0.0)
        return (rows - rows.sum(-1, keepdim=True) / count).where(counted, 0.0)

    return _relative(centred(expected), centred(got)).masked_fill(lost.any(-1), torch.inf)


def _relative(reference: Tensor, got: Tensor) -> Tensor:
    difference = (got - reference).norm(dim=-1)
    return (difference / reference.norm(dim=-1)).where(difference > 0, 0.0)
