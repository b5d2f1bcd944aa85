"""Sampling on a device: whole distributions, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024).

The token of a row depends on that row alone. The functions of tensors never ask the host, so that a CUDA graph can
record them; their shapes depend on nothing but the shape of the logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
CANDIDATES = 256  # enough for most cuts; where they are not, the whole row is sorted
COLUMNS = (
    5  # of the parameters: temperature (0: the most likely token), top_k, top_p, min_p, number in [0, 1)
)
NOT_FINITE, UNDECIDED = -1, -2  # in place of a token


def choose(values: Tensor, columns: np.ndarray) -> list[int]:
    """Sample a token of each row of float32 [rows, vocab], on any device, in one copy to the host; -1 as `NOT_FINITE`.

    `columns`: see `sampler.sampling_columns`.
    """
    vocab = values.shape[1]
    if not columns[:, 0].any():
        return greedy(values).tolist()  # type: ignore[no-any-return]
    asked = torch.from_numpy(columns).to(values.device)
    tokens: list[int] = sample(values, asked, cut=is_cut(columns, vocab)).tolist()
    wide = [i for i, token in enumerate(tokens) if token == UNDECIDED]
    if wide:
        for i, token in zip(wide, sample(values[wide], asked[wide], width=vocab).tolist(), strict=True):
            tokens[i] = token
    return tokens


def is_cut(columns: np.ndarray, vocab: int) -> bool:
    """Return True if a row that is sampled leaves out tokens by top_k, top_p or min_p."""
    heat, top_k, top_p, min_p = columns[:, :4].T
    return bool(((heat > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0))).any())


def sample(values: Tensor, asked: Tensor, *, cut: bool = True, width: int = CANDIDATES) -> Tensor:
    """Sample a token of each row of float32 [rows, vocab]; returns int64 [rows].

    `asked`: float64 [rows, COLUMNS]. `cut` False: no row has top_k, top_p or min_p. A row whose largest logit is not
    finite gets `NOT_FINITE`, one whose token may lie beyond its `width` most likely ones `UNDECIDED`.
    """
    vocab = values.shape[1]
    top, likely = values.max(-1, keepdim=True)
    heat = asked[:, :1]
    weights = ((values - top) / torch.where(heat > 0, heat, 1.0).to(values.dtype)).exp_()
    tokens = _of_whole(weights, asked[:, 4])
    if cut:
        limited = ((asked[:, 1] > 0) & (asked[:, 1] < vocab)) | (asked[:, 2] < 1) | (asked[:, 3] > 0)
        tokens = torch.where(limited, _of_candidates(values, weights, asked, min(width, vocab)), tokens)
    tokens = torch.where(heat[:, 0] > 0, tokens, likely[:, 0])
    return torch.where(top[:, 0].isfinite(), tokens, NOT_FINITE)


def greedy(values: Tensor) -> Tensor:
    """Return the most likely token of each row of [rows, vocab], int64 [rows]; `NOT_FINITE` as in `sample`."""
    top, likely = values.max(-1)
    return torch.where(top.isfinite(), likely, NOT_FINITE)


def _of_whole(weights: Tensor, draw: Tensor) -> Tensor:
    """Sample from full distributions float32 [rows, vocab]: block sums first, then a search within one block."""
    rows, vocab = weights.shape
    short = -vocab % BLOCK
    blocks = torch.nn.functional.pad(weights, (0, short)).view(rows, -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = sums[:, -1] * draw
    block = _first_above(sums, goal)
    own = blocks[torch.arange(rows, device=weights.device), block].double().cumsum(-1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    place = _first_above(own, goal - before)
    # Rounding may lead past the last token that has weight: then that one is meant.
    last = (own < own[:, -1:]).sum(-1)
    return block * BLOCK + torch.minimum(place, last)


def _of_candidates(values: Tensor, weights: Tensor, asked: Tensor, width: int) -> Tensor:
    """Sample from the candidates that top_k, top_p and min_p keep, by descending probability, then id.

    `UNDECIDED` where a kept token is no more likely than the last of the `width` candidates: others may be kept too.
    """
    vocab = values.shape[1]
    ids = values.topk(width, -1, sorted=False)[1].sort(-1)[0]
    best, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    _, top_k, top_p, min_p, draw = (column[:, None] for column in asked.unbind(1))
    top_k = torch.where(top_k > 0, top_k, vocab)
    own = weights.gather(1, ids).double()
    own = torch.where(torch.arange(width, device=values.device) < top_k, own, 0.0)
    reached = own.cumsum(-1)
    mass = torch.where(top_k <= width, reached[:, -1:], weights.sum(-1, True, dtype=torch.float64))
    kept = (reached - own < top_p * mass) | (top_p >= 1)
    kept &= (own > 0) & (own >= min_p)
    kept[:, 0] = True
    reached = torch.where(kept, own, 0.0).cumsum(-1)
    place = _first_above(reached, (reached[:, -1:] * draw)[:, 0])
    count = kept.sum(-1)
    tokens = ids.gather(1, torch.minimum(place, count - 1)[:, None])[:, 0]
    if width == vocab:
        return tokens
    least = best.gather(1, count[:, None] - 1)[:, 0]
    return torch.where(least > best[:, -1], tokens, UNDECIDED)


def _first_above(sums: Tensor, goal: Tensor) -> Tensor:
    """Return, per row of ascending sums, the first index whose sum exceeds the goal."""
    return torch.searchsorted(sums, goal[:, None].contiguous(), right=True)[:, 0].clamp_max(sums.shape[1] - 1)
