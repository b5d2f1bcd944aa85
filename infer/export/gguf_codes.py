"""Codes of a quantized weight in a block type of GGUF that holds them; scales are rounded to the type's float16.

The type of the source is tried first, then the others from the smallest on: what a type would give is decoded again
and compared with the weight, so that a type is taken only where every row comes back within the rounding of its scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..load.gguf.block_types import BLOCK_TYPES, SUPER, Parts
from ..weights import StoredCodes
from .stored_rows import BOUND, Difference, StoredRows, blocks_of, rows_at

BLOCK = 32
_E2M1, _IQ4, _TERNARY = (BLOCK_TYPES[name].table for name in ("MXFP4", "IQ4_NL", "TQ2_0"))


@dataclass(frozen=True)
class CarriedCodes:
    """Codes in a type of the file, and the relative difference of the weight that it stands for."""

    type: str
    error: float
    codes: StoredCodes

    def encoded(self, index: Tensor) -> Tensor:
        """Return the bytes uint8 [n, bytes of a row] of the rows `index` int64 [n]."""
        return _encode(self.type, rows_at(self.codes, index))


def carry(codes: StoredCodes, only: str = "") -> CarriedCodes | str:
    """Find the type for codes (`only`: this one or none); or the reason why no type holds them."""
    if codes.refused:
        return codes.refused
    if codes.order is not None:
        return "its groups are not of neighbouring columns (act-order), which no type of GGUF holds"
    first = rows_at(codes, torch.arange(1))
    for kind in sorted(_candidates(first), key=lambda name: name != codes.kind):
        if only and kind != only:
            continue
        if (found := _compared(kind, codes)).worst <= BOUND:
            return CarriedCodes(kind, found.error, codes)
    what = f"type {only}" if only else "no type of GGUF"
    return f"{what} holds {first.values} in groups of {first.coded.group}"


def _compared(kind: str, codes: StoredCodes) -> Difference:
    """Compare the weight with what the type gives, up to the first rows that do not fit."""
    found, block = Difference(), BLOCK_TYPES[kind]
    for index in blocks_of(*codes.shape):
        rows = rows_at(codes, index)
        raw = _encode(kind, rows).reshape(-1, block.num_bytes)
        found.add(block.decode(raw).reshape(len(index), -1), rows.coded.decode())
        if not found.worst <= BOUND:
            break
    return found


def _candidates(rows: StoredRows) -> Iterator[str]:
    """Yield the types that may hold such rows, smallest first."""
    table, minimum, group = rows.table, rows.coded.minimum is not None, rows.coded.group
    supers = rows.coded.columns % SUPER == 0 and rows.coded.scale.dtype == torch.int8 and group < SUPER
    whole = group % BLOCK == 0
    if supers:
        yield from _SUPER_TYPES.get((table, minimum, group), ())
    if group % SUPER == 0 and not minimum and table == _TERNARY:
        yield from ("TQ1_0", "TQ2_0")
    if whole and not minimum and _multiple_of(table, _E2M1):
        yield "MXFP4"
    grid = rows.grid()
    if whole and not minimum:
        if grid is not None and grid[1] == 8 and len(table) == 16:
            yield "Q4_0"
        if _multiple_of(table, _IQ4):
            yield "IQ4_NL"
    if whole and grid is not None and len(table) <= 16:
        yield "Q4_1"
    if whole and table in ((), BLOCK_TYPES["Q5_0"].table, BLOCK_TYPES["Q5_1"].table):
        yield "Q5_1" if minimum else "Q5_0"
    if supers and not minimum and group % 16 == 0 and rows.integers() is not None:
        yield "Q6_K"
    if whole and not minimum and rows.integers() is not None:
        yield "Q8_0"


def _super_types() -> dict[tuple[tuple[float, ...], bool, int], list[str]]:
    """Return the types with super-scales, smallest first, by table, whether there are minima, and group."""
    found: dict[tuple[tuple[float, ...], bool, int], list[str]] = {}
    for kind in sorted(BLOCK_TYPES.values(), key=lambda kind: kind.num_bytes):
        if "super_scale" in kind.meanings:
            found.setdefault((kind.table, "minimum" in kind.meanings, kind.group), []).append(kind.name)
    return found | {((), True, 32): ["Q5_K"]}  # artifacts of earlier versions hold its codes in bytes


_SUPER_TYPES = _super_types()


def _multiple_of(table: tuple[float, ...], wanted: tuple[float, ...]) -> bool:
    if len(table) != len(wanted):
        return False
    unit = table[-1] / wanted[-1]
    return all(one == unit * other for one, other in zip(table, wanted, strict=True))


def _encode(kind: str, rows: StoredRows) -> Tensor:
    """Return the bytes of rows in a type, uint8 [rows, bytes]."""
    raw = BLOCK_TYPES[kind].join(_PARTS[kind](rows) if kind in _PARTS else _as_stored(rows))
    return raw.reshape(rows.coded.num_rows, -1)


def _as_stored(rows: StoredRows) -> Parts:
    """Return codes and parts by blocks of a type with super-scales, whose layout they have."""
    codes = rows.codes().reshape(-1, SUPER)
    return {"codes": codes} | {
        name: part.reshape(len(codes), -1)
        for name, part in rows.coded._asdict().items()
        if part is not None and name not in ("codes", "table")
    }


def _by_blocks(rows: StoredRows, codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Parts:
    """Return blocks of 32 codes; scales and minima [rows, groups] repeated for each."""
    times = rows.coded.group // BLOCK
    found = {"codes": codes.reshape(-1, BLOCK)}
    for name, values in (("scale", scale), ("minimum", minimum)):
        if values is not None:
            found[name] = values.repeat_interleave(times, 1).reshape(-1, 1)
    return found


def _table_blocks(rows: StoredRows) -> Parts:
    grid = rows.grid()
    unit = grid[0] if grid is not None else rows.table[-1] / _IQ4[-1]
    return _by_blocks(rows, rows.codes(), rows.coded.steps() * unit)


def _float4_blocks(rows: StoredRows) -> Parts:
    return _by_blocks(rows, rows.codes(), rows.coded.steps() * (rows.table[-1] / _E2M1[-1]))


def _grid_blocks(rows: StoredRows) -> Parts:
    unit, zero = rows.grid() or (1.0, 0.0)
    steps, minima = rows.coded.steps() * unit, rows.coded.minima()
    least = steps * -zero
    return _by_blocks(rows, rows.codes(), steps, least if minima is None else least + minima)


def _integer_blocks(rows: StoredRows, zero: int = 0) -> Parts:
    codes, unit = rows.integers() or (rows.codes(), 1.0)
    return _by_blocks(rows, codes.clamp(-128, 127) + zero, rows.coded.steps() * unit, rows.coded.minima())


def _q6_k(rows: StoredRows) -> Parts:
    codes, unit = rows.integers() or (rows.codes(), 1.0)
    scale = rows.coded.scale.repeat_interleave(rows.coded.group // 16, 1)
    return {
        "codes": codes.reshape(-1, SUPER).to(torch.int16) + 32,
        "scale": scale.reshape(-1, SUPER // 16),
        "super_scale": (rows.super_scales() * unit).reshape(-1, 1),
    }


def _ternary_blocks(rows: StoredRows) -> Parts:
    scale = rows.coded.steps().repeat_interleave(rows.coded.group // SUPER, 1)
    return {"codes": rows.codes().reshape(-1, SUPER), "scale": scale.reshape(-1, 1)}


_PARTS: dict[str, Callable[[StoredRows], Parts]] = {
    **dict.fromkeys(("TQ1_0", "TQ2_0"), _ternary_blocks),
    **{"Q4_0": _table_blocks, "IQ4_NL": _table_blocks, "Q4_1": _grid_blocks, "MXFP4": _float4_blocks},
    **{
        "Q5_0": partial(_integer_blocks, zero=16),
        "Q5_1": _integer_blocks,
        "Q8_0": _integer_blocks,
        "Q6_K": _q6_k,
    },
}
