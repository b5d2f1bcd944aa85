"""Codes of a stack of experts, from those of each expert's projections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..weights.stored_codes import StoredCodes

_NUMBERS = 1 << 24  # rows of one projection at most: the next one's numbers begin here


def stack_codes(
    experts: Sequence[Sequence[StoredCodes]], convert: Callable[[list[Tensor]], Tensor]
) -> StoredCodes:
    """Return the rows of all experts, one expert after another, as `convert` places those of its projections.

    `convert` maps the projections of one expert, each [rows, K], to its weight [N, K]; it is run on row numbers.
    """
    first = experts[0]
    kind = first[0].kind
    refused = next((codes.refused for own in experts for codes in own if codes.refused), "")
    if refused:
        return StoredCodes.without(kind, refused)
    if len({(codes.kind, codes.shape[1]) for own in experts for codes in own}) > 1:
        return StoredCodes.without(kind, "its experts are stored in several forms")
    numbers = [
        (torch.arange(codes.shape[0], dtype=torch.float64) + _NUMBERS * i)[:, None].expand(-1, 2).clone()
        for i, codes in enumerate(first)
    ]
    placed = convert(numbers)
    if placed.shape != (sum(map(len, numbers)), 2) or not torch.equal(placed[:, 0], placed[:, 1]):
        return StoredCodes.without(kind, "transformers stores its experts by columns")
    starts = torch.tensor([0, *(len(one) for one in numbers)]).cumsum(0)
    place = placed[:, 0].long()
    order = starts[place // _NUMBERS] + place % _NUMBERS
    count = len(order)

    def rows(start: int, stop: int) -> dict[str, Tensor]:
        parts = []
        for e in range(start // count, -(-stop // count)):
            own = [codes.rows(0, codes.shape[0]) for codes in experts[e]]
            wanted = order[max(start - e * count, 0) : stop - e * count]
            joined = {k: v if k == "table" else torch.cat([one[k] for one in own]) for k, v in own[0].items()}
            parts.append({k: v if k == "table" else v[wanted] for k, v in joined.items()})
        return {k: v if k == "table" else torch.cat([one[k] for one in parts]) for k, v in parts[0].items()}

    return StoredCodes(kind, (count * len(experts), first[0].shape[1]), rows, first[0].dtype, experts=True)
