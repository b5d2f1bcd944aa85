"""Forms of a rotary embedding, and the plain computation that every kernel of them is compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Where the two numbers of a pair lie, in the input and in the result (Su et al., RoFormer, 2021).
HALVES = 0  # i and i + width / 2, as in GPT-NeoX and Llama
INTERLEAVED = 1  # 2 i and 2 i + 1, as in GPT-J
INTERLEAVED_TO_HALVES = 2  # 2 i and 2 i + 1 of the input, i and i + width / 2 of the result, as in DeepSeek
ORDERS = (HALVES, INTERLEAVED, INTERLEAVED_TO_HALVES)


class RotaryForm(NamedTuple):
    """Columns of a head that are rotated: `width` of them from `start` on, in pairs that `order` describes."""

    start: int
    width: int
    order: int

    def refuses(self, head_dim: int, columns: int) -> str | None:
        """Return why heads of `head_dim` with `columns` cosines a token can't be rotated so, or None."""
        if self.order not in ORDERS:
            return f"expected an order of pairs of {ORDERS}, got {self.order}"
        if self.width < 2 or self.width % 2 or self.start < 0 or self.start + self.width > head_dim:
            return f"columns {self.start} to {self.start + self.width} of heads of {head_dim}"
        if columns not in (self.width, self.width // 2):
            return f"{columns} cosines for {self.width} columns; expected one a column or one a pair"
        return None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm) -> Tensor:
    """Return heads x [T, H, D] with their pairs (a, b) turned to (a cos - b sin, b cos + a sin).

    cos, sin [T, width], in the order of the result's columns, or [T, width / 2], a number for each pair. Computed in
    float32 and rounded once to the dtype of x.
    """
    end = form.start + form.width
    a, b = _pairs(x[..., form.start : end].float(), interleaved=form.order != HALVES)
    cos_a, cos_b = _factors(cos, form)
    sin_a, sin_b = _factors(sin, form)
    turned = (a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    joined = torch.stack(turned, -1).flatten(-2) if form.order == INTERLEAVED else torch.cat(turned, -1)
    return torch.cat([x[..., : form.start], joined.to(x.dtype), x[..., end:]], -1)


def _factors(numbers: Tensor, form: RotaryForm) -> tuple[Tensor, Tensor]:
    """Return the numbers of the first and of the second columns of all pairs, float32 [T, 1, width / 2] each."""
    numbers = numbers.float()[:, None]
    if numbers.shape[-1] < form.width:
        return numbers, numbers
    return _pairs(numbers, interleaved=form.order == INTERLEAVED)


def _pairs(x: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    split = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    return split[..., 0], split[..., 1]
