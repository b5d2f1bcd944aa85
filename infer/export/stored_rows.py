"""Rows of a weight that is quantized already: codes unpacked, scales and minima in float32, and the weight itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.ops.bitpack import LEVELS, unpack
from ..kernels.ops.coded_weight import LUT, SUPER, CodedWeight
from ..weights import StoredCodes

WEIGHTS = 1 << 22  # of the rows that are read at a time
BOUND = 2.0**-10  # relative error of a row whose codes are carried over: that of scales rounded to float16
_PARTS = 16  # of the least value of a table that may be the unit of all


@dataclass(frozen=True)
class StoredRows:
    """Rows of codes, of a weight with one table or none."""

    coded: CodedWeight

    @property
    def table(self) -> tuple[float, ...]:
        """Values of the codes, empty for integers."""
        return () if self.coded.table is None else tuple(self.coded.table.flatten().tolist())

    @property
    def values(self) -> str:
        """Describe the values of the codes, for a reason."""
        table = f"a table of {len(self.table)} values" if self.table else "integers"
        return f"{table} with minima" if self.coded.minimum is not None else table

    def codes(self) -> Tensor:
        """Return codes [rows, K]: uint8 below the length of the table, or int8."""
        return self.coded.codes if not self.table else unpack(self.coded.codes, self.coded.bits)

    def super_scales(self) -> Tensor:
        """Return the super-scales of each 256 columns, float32 [rows, ceil(K / 256)]."""
        supers = self.coded.super_scale
        if supers is None:
            raise ValueError("scales without super-scales")
        if self.coded.layout == LUT:
            return (supers.float() / LEVELS)[:, None].expand(-1, -(-self.coded.columns // SUPER))
        return supers.float()

    def integers(self) -> tuple[Tensor, float] | None:
        """Return codes int16 [rows, K] and the unit that makes values of them; None for a table of other numbers."""
        if not self.table:
            return self.codes().to(torch.int16), 1.0
        table = torch.tensor(self.table, dtype=torch.float64)
        least = float(table[table != 0].abs().min()) if bool(table.any()) else 1.0
        for parts in range(1, _PARTS + 1):
            unit = least / parts
            whole = (table / unit).round()
            if float(whole.abs().max()) > 127:
                return None
            if float((whole - table / unit).abs().max()) <= 1e-5:
                return whole.to(torch.int16)[self.codes().int()], unit
        return None

    def grid(self) -> tuple[float, float] | None:
        """Return unit and zero point of a table of equal steps, `unit * (code - zero)`; None for others."""
        if not self.table:
            return None
        table = torch.tensor(self.table, dtype=torch.float64)
        unit = float(table[1] - table[0])
        equal = bool((table.diff() == unit).all()) and unit > 0
        return (unit, -float(table[0]) / unit) if equal else None


def rows_at(codes: StoredCodes, index: Tensor) -> StoredRows:
    """Read the rows of `index` int64 [n], which lie near each other."""
    low, high = int(index.min()), int(index.max()) + 1
    read, place = codes.rows(low, high), index - low
    return StoredRows(CodedWeight.of({n: part if n == "table" else part[place] for n, part in read.items()}))


def blocks_of(count: int, columns: int) -> Iterator[Tensor]:
    """Yield the numbers of `count` rows in blocks of about `WEIGHTS` weights."""
    step = max(WEIGHTS // columns, 1)
    for start in range(0, count, step):
        yield torch.arange(start, min(start + step, count))


@dataclass
class Difference:
    """Sums of squares of a weight and of its difference from what is written."""

    squares: float = 0.0
    of_difference: float = 0.0
    worst: float = 0.0  # relative difference of a row

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """Add rows of float32 [n, K]; NaN and infinity count as infinite."""
        apart = (found - wanted).double().norm(dim=1).nan_to_num(torch.inf, torch.inf)
        whole = wanted.double().norm(dim=1)
        self.of_difference += float(apart.square().sum())
        self.squares += float(whole.square().sum())
        relative = torch.where(apart == 0, 0.0, apart / whole.clamp_min(1e-30))
        self.worst = max(self.worst, float(relative.max()) if len(relative) else 0.0)

    @property
    def error(self) -> float:
        """Relative RMS difference."""
        return (self.of_difference / self.squares) ** 0.5 if self.squares else 0.0


def error_text(error: float) -> str:
    """Describe how codes came over, for a report."""
    return "exactly" if error == 0 else f"codes as they are, scales rounded: relative difference {error:.2g}"
