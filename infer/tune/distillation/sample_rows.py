"""Rows of sample inputs for training: a batch has no column that is padding in all of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...load.samples.sample_split import exclude_rows
from ...spec import BATCH, DTYPE_NAMES, TensorSpec
from ..objective import TensorRows, shuffled


class SampleRows(TensorRows):
    """Rows of a model's named inputs; texts are cut to the longest of their batch."""

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        found = super().batch(numbers)
        mask = found.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return found
        longest = max(int(mask.any(0).nonzero().max()) + 1 if mask.any() else 1, 1)
        return {
            name: value[:, :longest] if value.shape[:2] == mask.shape else value
            for name, value in found.items()
        }


def split_rows(
    samples: Mapping[str, Tensor], share: float, seed: int
) -> tuple[SampleRows, SampleRows | None]:
    """Split into training and held-out rows; a row that is also held out is not trained on.

    No row is held out of fewer than two, or of a share of 0.
    """
    count = len(next(iter(samples.values())))
    aside = min(count - 1, max(1, round(share * count))) if share and count > 1 else 0
    if not aside:
        return SampleRows(samples), None
    order = torch.tensor(shuffled(count, seed, -1))
    held = {name: value[order[:aside]] for name, value in samples.items()}
    specs = [TensorSpec(name, DTYPE_NAMES[value.dtype], (BATCH,)) for name, value in samples.items()]
    rest = exclude_rows({name: value[order[aside:]] for name, value in samples.items()}, held, specs)
    return (SampleRows(rest), SampleRows(held)) if rest else (SampleRows(samples), None)
