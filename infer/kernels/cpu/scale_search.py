"""Native forms of the searches that quantizing spends its time in; `infer/compress` holds their slow twins."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..ops.bitpack import FINE, GROUP, TABLE_ROWS
from . import _pointer, load, why_not

__all__ = ["SHARES", "STEPS", "codebooks", "fit", "why_not"]

SHARES, STEPS = 32, 16  # scales tried at once, as shares of the largest and as int8 levels


def fit(
    weight: Tensor, table: Tensor, bounds: Tensor, importance: Tensor, inverses: Tensor, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor]:
    """Native form of `group_scales.fit`: codes uint8 [R, K], scale int8 [R, K/group], row_scale float32 [R].

    weight [R, K], table [T, 4, 8, 16 or 64], bounds [T, one less], importance [K], inverses [SHARES], all float32.
    Groups are of 64, or of 16 with tables of 16. Raises `ValueError` for others.
    """
    if group not in ((GROUP, FINE) if table.shape[1] == 16 else (GROUP,)):
        raise ValueError(f"groups of {group} with tables of {table.shape[1]}: {GROUP}, or {FINE} with 16")
    rows, columns = weight.shape
    given = [t.float().contiguous() for t in (weight, table, bounds, importance, inverses)]
    sizes = (rows, columns, *table.shape, group)
    found = (
        torch.empty((rows, columns), dtype=torch.uint8),
        torch.empty((rows, columns // group), dtype=torch.int8),
        torch.empty(rows, dtype=torch.float32),
    )
    load().infer_fit(*map(_pointer, given), *map(ctypes.c_int64, sizes), *map(_pointer, found))
    return found


def codebooks(weight: Tensor, importance: Tensor, clusters: int, bins: int) -> Tensor:
    """Native `cluster.learn`: float32 weight [R, K] and importance [K] to codebooks float32 [R / 32, clusters]."""
    rows, columns = weight.shape
    given = [t.float().contiguous() for t in (weight, importance)]
    found = torch.empty((-(-rows // TABLE_ROWS), clusters), dtype=torch.float32)
    sizes = (rows, columns, clusters, bins)
    load().infer_codebooks(*map(_pointer, given), *map(ctypes.c_int64, sizes), _pointer(found))
    return found
