"""Rows whose statistics calibrate: those that were split off, or as many texts as the weights need.

A Hessian of few rows knows only some of the directions in which its layer's inputs vary, and error feedback moves
errors into the others. 64 short texts have less tokens than some layers have columns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...options.values import recovery_budget
from ..layer_kinds import is_product, rows_of

TOKENS_PER_COLUMN = 6
MULTIPLICATIONS = 3e11  # of one forward pass over all rows: some 40 s of statistics on two cores
RECOVERY_TOKENS_PER_COLUMN = 24
SHARE = 0.2  # of the budget of a recovery
PASSES = 10  # time of a row's statistics by that of its forward pass: gradients, products
LANGUAGE = "text-generation"  # the task whose recovery counts tokens, others count rows
MASK = "attention_mask"
MULTIPLE = 8  # tokens

Rows = Mapping[str, Tensor]


def more_batches(
    model: nn.Module, training: Rows, calibration: Rows, task: str, recover: str, batch: int
) -> list[dict[str, Tensor]]:
    """Return batches of texts of like length, cut to their longest, whose statistics are worth their time.

    At least as many rows as those of `calibration`, and no more than give each column of the widest layer
    `TOKENS_PER_COLUMN` tokens or take `MULTIPLICATIONS`. With a budget `recover`, `RECOVERY_TOKENS_PER_COLUMN` tokens
    or `SHARE` of that budget.
    """
    count, lengths, products = _length(training), _lengths(training), _products(model)
    mean = float(lengths.sum()) / max(count, 1)
    per_column = RECOVERY_TOKENS_PER_COLUMN if recover else TOKENS_PER_COLUMN
    least = min(count, _length(calibration))
    wanted = min(
        count, math.ceil(per_column * max((size[0] for size in products), default=0) / max(mean, 1.0))
    )
    if recover and wanted > least:
        wanted = min(wanted, _affordable(model, training, lengths, task, recover, batch))
    elif weights := sum(columns * rows for columns, rows in products):
        wanted = min(wanted, int(MULTIPLICATIONS / (weights * max(mean, 1.0))))
    wanted = max(least, wanted)
    index = torch.arange(wanted) * count // max(wanted, 1)
    index = index[lengths[index].argsort(stable=True)]
    return [_cut(training, lengths, index[start : start + batch]) for start in range(0, wanted, batch)]


def _affordable(
    model: nn.Module, training: Rows, lengths: Tensor, task: str, recover: str, batch: int
) -> int:
    seconds, terms = recovery_budget(recover)
    if terms is not None:
        each = float(lengths.float().mean()) if task == LANGUAGE else 1.0
        return int(SHARE * terms / max(each, 1.0))
    order = lengths.argsort(stable=True)
    middle = order[len(order) // 2 :][:batch]
    taken = _forward_seconds(model, _cut(training, lengths, middle)) / len(middle)
    return int(SHARE * (seconds or 0.0) / (PASSES * max(taken, 1e-9)))


@torch.no_grad()
def _forward_seconds(model: nn.Module, batch: Rows) -> float:
    taken = []
    for _ in range(2):  # the first call allocates
        begin = time.perf_counter()
        model(**batch)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _products(model: nn.Module) -> list[tuple[int, int]]:
    """Return columns and rows of the weight of each layer that is a matrix product."""
    weights = [rows_of(layer) for layer in model.modules() if is_product(layer)]
    return [(weight[0].numel(), len(weight)) for weight in weights]


def _length(rows: Rows) -> int:
    return min(map(len, rows.values()), default=0)


def _lengths(rows: Rows) -> Tensor:
    """Return the tokens of each row up to its last real one, int64 [rows]."""
    first, mask = next(iter(rows.values())), rows.get(MASK)
    if mask is None or mask.dim() != 2:
        return torch.full((len(first),), first.shape[1] if first.dim() > 1 else 1)
    return real_lengths(mask)


def real_lengths(mask: Tensor) -> Tensor:
    """Return the tokens up to the last real one of each row of an attention mask, at least 1: int64 [rows]."""
    return ((mask != 0) * torch.arange(1, mask.shape[1] + 1)).amax(1).clamp_min(1)


def _cut(rows: Rows, lengths: Tensor, index: Tensor) -> dict[str, Tensor]:
    """Return these rows, without the tokens that are padding in all of them."""
    mask = rows.get(MASK)
    longest = -(-int(lengths[index].max()) // MULTIPLE) * MULTIPLE
    cut = mask is not None and all(each.shape == mask.shape for each in rows.values())
    return {name: value[index][:, :longest] if cut else value[index] for name, value in rows.items()}
