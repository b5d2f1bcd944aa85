"""Products whose columns are cut into parts (split-K): how many parts, how long, and where their sums go."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import cdiv, processors


def split_of(programs: int, steps: int, device: torch.device, wanted: int) -> int:
    """Return into how many parts to cut the columns so that each multiprocessor has about `wanted` programs.

    `steps` is the number of column blocks: a part has at least two, because each part costs a launch's tail.
    """
    room = processors(device) * wanted // max(programs, 1)
    return max(1, min(room, steps // 2, 16))


def even_parts(units: int, parts: int, step: int = 1) -> tuple[int, int]:
    """Return the units of one part, a multiple of `step` (at least one step), and how many parts that makes."""
    each = max(cdiv(cdiv(units, parts), step), 1) * step
    return each, max(cdiv(units, each), 1)


def result_or_sums(x: Tensor, num_rows: int, num_out: int, parts: int) -> Tensor:
    """Return an empty [num_rows, num_out] in x's dtype for one part, float32 [parts, num_rows, num_out] for several."""
    shape = (num_rows, num_out)
    return x.new_empty(shape) if parts == 1 else x.new_empty((parts, *shape), dtype=torch.float32)


def power_above(number: int) -> int:
    """Return the smallest power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def gemm_rows(num_rows: int, most: int = 128) -> int:
    """Return the rows of x in one tile of the tensor cores: a power of two from 16 on."""
    return min(max(16, power_above(num_rows)), most)
