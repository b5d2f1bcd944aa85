"""Split of sample rows into held-out rows, which judge the result, and calibration rows; disjoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ... import rows
from ...spec import Finding, TensorSpec
from ...weights.file_blocks import raw_bytes

MAX_ROWS = 128  # of text that judge
COINS = 4  # seed of the split: of data with a period up to 12, rows of each kind judge and calibrate
Samples = dict[str, Tensor]


def split(
    samples: Mapping[str, Tensor], specs: tuple[TensorSpec, ...], *, together: int = 1
) -> tuple[Samples, Samples]:
    """Split into (held out, calibration): of every two rows, or of so many `together`, a seeded coin holds out one.

    Sorted data is spread over both, and so is data whose kinds come in turn; equal rows count as one. A row whose
    content is among those held out does not calibrate. Inputs without rows can't be split: nothing calibrates then.
    """
    if not rows.have_rows(specs):
        return dict(samples), {}
    digests = _digests(samples, specs)
    units = [tuple(digests[i : i + together]) for i in range(0, len(digests), together)]
    number = {unit: index for index, unit in enumerate(dict.fromkeys(units))}
    coins = torch.randint(0, 2, (len(units),), generator=torch.Generator().manual_seed(COINS)).tolist()
    side = torch.tensor([(number[unit] + coins[number[unit] // 2]) % 2 for unit in units])
    side = side.repeat_interleave(together)[: len(digests)]
    held, rest = (rows.take(specs, samples, (side == which).nonzero()[:, 0]) for which in (0, 1))
    return held, exclude_rows(rest, held, specs)


def spread_rows(samples: Mapping[str, Tensor], most: int, specs: Sequence[TensorSpec]) -> Samples:
    """Return at most so many rows, spread evenly."""
    count = rows.count(specs, samples)
    if count <= most:
        return dict(samples)
    return rows.take(specs, samples, torch.tensor([i * count // most for i in range(most)]))


def exclude_rows(
    samples: Mapping[str, Tensor], others: Mapping[str, Tensor], specs: Sequence[TensorSpec]
) -> Samples:
    """Return the rows of `samples` that are not in `others`; an empty mapping when none is left."""
    if not rows.have_rows(specs):
        same = all(torch.equal(samples[spec.name], others[spec.name]) for spec in specs)
        return {} if same else dict(samples)
    taken = set(_digests(others, specs))
    keep = [index for index, row in enumerate(_digests(samples, specs)) if row not in taken]
    return rows.take(specs, samples, torch.tensor(keep)) if keep else {}


def _digests(samples: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> list[bytes]:
    """Return a digest of each row over all inputs that have rows."""
    own = [spec for spec in specs if spec.batched] if samples else []
    found = []
    for index in range(rows.count(own, samples) if own else 0):
        digest = hashlib.sha256()
        for value in rows.cut(own, samples, index, index + 1).values():
            digest.update(raw_bytes(value.contiguous()))
        found.append(digest.digest())
    return found


def describe_split(
    held: Mapping[str, Tensor],
    calibration: Mapping[str, Tensor],
    specs: Sequence[TensorSpec],
    source: str,
    digest: str,
) -> list[Finding]:
    """Report source, number and hash of the calibration rows."""
    if not calibration:
        return []
    count, judging = (rows.count(specs, part) for part in (calibration, held))
    why = f"{source}; sha256 {digest}; none of them is among the {judging} that judge"
    return [Finding("load", "calibration rows", count, "rows", why)]
