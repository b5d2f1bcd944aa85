"""Products by weights that are first decoded to the dtype of x, for many rows of x: cuBLAS multiplies."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

MOST_WEIGHTS = 1 << 27  # decoded at once: larger weights are decoded in pieces, so that the copy stays small


def decoded_linear(
    x: Tensor, num_out: int, weight_rows: Callable[[int, int], Tensor], bias: Tensor | None, multiple: int = 1
) -> Tensor:
    """Multiply x [M, K] by a weight [num_out, K] of which `weight_rows(start, stop)` decodes rows to x's dtype.

    `start` is a multiple of `multiple`. Returns [M, num_out] in x's dtype.
    """
    height = max(MOST_WEIGHTS // max(x.shape[1], 1) // multiple, 1) * multiple
    added = None if bias is None else bias.to(x.dtype)
    if height >= num_out:
        return F.linear(x, weight_rows(0, num_out), added)
    y = x.new_empty((x.shape[0], num_out))
    for start in range(0, num_out, height):
        part = slice(start, min(start + height, num_out))
        y[:, part] = F.linear(x, weight_rows(part.start, part.stop), None if added is None else added[part])
    return y
