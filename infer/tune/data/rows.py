"""Rows of named tensors in memory, cut to what a batch needs; a deterministic order, and a hash of the contents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...compress.assign.calibration_rows import real_lengths
from ...load.samples.sample_split import exclude_rows
from ...spec import BATCH, DTYPE_NAMES, TensorSpec
from ..objective import Rows

WINDOW = 16  # batches within which rows are ordered by length
MULTIPLE = 8  # tokens


class TensorRows:
    """Rows of named tensors in memory, all of the same length; a batch is the same dict of fewer rows."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def order(self, seed: int, epoch: int) -> Sequence[int]:
        return shuffled(len(self), seed, epoch)

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        index = torch.tensor(numbers, dtype=torch.int64)
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    @property
    def digest(self) -> str:
        return digest_of(self.tensors)


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of `range(count)` that depends on nothing but the arguments."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) & (2**63 - 1))
    return torch.randperm(count, generator=generator).tolist()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, dtypes, shapes and bytes of tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def rows_of_step(rows: Rows, start: int, count: int, seed: int) -> list[int]:
    """Return `count` row numbers from position `start` of the endless stream of epochs."""
    found: list[int] = []
    while len(found) < count:
        epoch, position = divmod(start + len(found), len(rows))
        found += rows.order(seed, epoch)[position : position + count - len(found)]
    return found


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


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor of its dicts, lists and tuples on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
