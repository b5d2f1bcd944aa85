"""Rows of padded texts in batches of like length, without the padding that no row of a batch needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...compress.assign.calibration_rows import real_lengths
from ..objective import TensorRows, shuffled

WINDOW = 16  # batches within which rows are ordered by length
MULTIPLE = 8  # tokens


class PaddedRows(TensorRows):
    """Texts padded on the right, `input_ids` and `attention_mask` [rows, tokens]; a batch is cut to its longest."""

    def __init__(self, tensors: Mapping[str, Tensor], batch: int) -> None:
        super().__init__(tensors)
        self.lengths = real_lengths(self.tensors["attention_mask"]).tolist()
        self._batch = batch
        self._last: tuple[tuple[int, int], Sequence[int]] | None = None

    def order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return all rows in random batches, the rows of each of like length."""
        if self._last is None or self._last[0] != (seed, epoch):
            self._last = (seed, epoch), self._ordered(seed, epoch)
        return self._last[1]

    def _ordered(self, seed: int, epoch: int) -> list[int]:
        rows, size = shuffled(len(self), seed, epoch), WINDOW * self._batch
        near = [
            row
            for start in range(0, len(rows), size)
            for row in sorted(rows[start : start + size], key=self.lengths.__getitem__)
        ]
        whole = len(near) // self._batch
        batches = [near[index * self._batch : (index + 1) * self._batch] for index in range(whole)]
        mixed = [row for index in shuffled(whole, seed, epoch) for row in batches[index]]
        return [*mixed, *near[whole * self._batch :]]

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        longest = -(-max(self.lengths[row] for row in numbers) // MULTIPLE) * MULTIPLE
        return {name: tensor[:, :longest] for name, tensor in super().batch(numbers).items()}


def is_padded_text(tensors: Mapping[str, Tensor]) -> bool:
    """Return true for texts of which every tensor is [rows, tokens] and some row has padding on the right."""
    if not {"input_ids", "attention_mask"} <= tensors.keys():
        return False
    mask = tensors["attention_mask"]
    alike = mask.dim() == 2 and all(each.shape == mask.shape for each in tensors.values())
    return alike and not bool(mask[:, -1].all())
