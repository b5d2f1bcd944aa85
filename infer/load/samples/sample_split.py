"""Split of sample rows into held-out rows, which judge the result, and calibration rows; disjoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ...spec import Finding, TensorSpec
from ..weights import raw_bytes

Samples = dict[str, Tensor]


def split(
    samples: Mapping[str, Tensor], specs: tuple[TensorSpec, ...], *, together: int = 1
) -> tuple[Samples, Samples]:
    """Split into (held out, calibration) by alternate rows, or so many `together`: sorted data is spread over both.

    A row whose content is among those held out does not calibrate. Inputs of a fixed batch can't be split: nothing
    calibrates then.
    """
    if not all(spec.batched for spec in specs):
        return dict(samples), {}
    sides = []
    for side in (0, 1):
        keep = [i for i in range(min(map(len, samples.values()))) if i // together % 2 == side]
        sides.append({name: value[keep] for name, value in samples.items()})
    return sides[0], exclude_rows(sides[1], sides[0])


def spread_rows(samples: Mapping[str, Tensor], most: int) -> Samples:
    """Return at most so many rows, spread evenly."""
    count = min(map(len, samples.values()))
    if count <= most:
        return dict(samples)
    index = torch.tensor([i * count // most for i in range(most)])
    return {name: value.index_select(0, index) for name, value in samples.items()}


def exclude_rows(samples: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Samples:
    """Return the rows of `samples` that are not in `others`; an empty mapping when none is left."""
    taken = set(_rows(others))
    keep = [index for index, row in enumerate(_rows(samples)) if row not in taken]
    if not keep:
        return {}
    index = torch.tensor(keep)
    return {name: value.index_select(0, index) for name, value in samples.items()}


def _rows(samples: Mapping[str, Tensor]) -> list[bytes]:
    """Return a digest of each row over all inputs."""
    count = min((len(value) for value in samples.values()), default=0)
    rows = []
    for index in range(count):
        digest = hashlib.sha256()
        for value in samples.values():
            digest.update(raw_bytes(value[index].contiguous()))
        rows.append(digest.digest())
    return rows


def describe_split(
    held: Mapping[str, Tensor], calibration: Mapping[str, Tensor], source: str, digest: str
) -> list[Finding]:
    """Report source, number and hash of the calibration rows."""
    if not calibration:
        return []
    rows, judging = (len(next(iter(part.values()))) for part in (calibration, held))
    why = f"{source}; sha256 {digest}; none of them is among the {judging} that judge"
    return [Finding("load", "calibration rows", rows, "rows", why)]
