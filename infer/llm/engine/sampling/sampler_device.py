"""Sampling on a device: whole distributions, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024).

The token of a row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling_options import Sampling

BLOCK = 256
CANDIDATES = 256  # enough for most cuts by mass; where they are not, the whole row is sorted


def most_likely(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the most likely token of each row and its logit, NaN for a row with NaN, in one copy to the host."""
    top, ids = logits.max(-1)
    tokens, values = torch.stack((ids.double(), top.double())).tolist()  # exact: ids are below 2**53
    return [int(token) for token in tokens], values


def choose(values: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> list[int]:
    """Sample a token of each row of float32 [rows, vocab], on any device."""
    vocab, tokens = values.shape[1], [0] * len(samplings)
    cut = [i for i, s in enumerate(samplings) if 0 < s.top_k < vocab or s.top_p < 1 or s.min_p > 0]
    rest = sorted(set(range(len(samplings))) - set(cut))
    for rows, by in ((cut, sample_truncated), (rest, sample_full)):
        if rows:
            part = values if len(rows) == len(values) else values[rows]
            found = by(part, [samplings[i] for i in rows], [draws[i] for i in rows])
            for i, token in zip(rows, found, strict=True):
                tokens[i] = token
    return tokens


def sample_full(values: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> list[int]:
    """Sample from whole distributions, float32 [rows, vocab]; blocks are summed first and one of them is searched."""
    weights = _weights(values, samplings, values.amax(-1, keepdim=True))
    rows, vocab = weights.shape
    short = -vocab % BLOCK
    blocks = torch.nn.functional.pad(weights, (0, short)).view(rows, -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = sums[:, -1] * torch.tensor(draws, dtype=torch.float64, device=values.device)
    block = _first_above(sums, goal)
    own = blocks[torch.arange(rows, device=values.device), block].double().cumsum(-1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    place = _first_above(own, goal - before)
    # Rounding may lead past the last token that has weight: then that one is meant.
    last = (own < own[:, -1:]).sum(-1)
    return (block * BLOCK + torch.minimum(place, last)).tolist()


def sample_truncated(values: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> list[int]:
    """Sample from what top_k, then top_p, then min_p leave of float32 [rows, vocab], most likely first."""
    vocab = values.shape[1]
    tokens = [0] * len(samplings)
    groups: dict[
        int, list[int]
    ] = {}  # by how many candidates are looked at: equal ones then always come in one order
    for i, sampling in enumerate(samplings):
        width = sampling.top_k if 0 < sampling.top_k < vocab else min(CANDIDATES, vocab)
        groups.setdefault(width, []).append(i)
    for width, rows in groups.items():
        whole = len(rows) == len(samplings)
        part = values if whole else values[rows]
        found, enough = _sample_top(part, width, [samplings[i] for i in rows], [draws[i] for i in rows])
        wide = [at for at, is_enough in enumerate(enough) if not is_enough]
        if wide:
            named = [rows[at] for at in wide]
            again, _ = _sample_top(
                part[wide], vocab, [samplings[i] for i in named], [draws[i] for i in named]
            )
            for at, token in zip(wide, again, strict=True):
                found[at] = token
        for i, token in zip(rows, found, strict=True):
            tokens[i] = token
    return tokens


def _sample_top(
    values: Tensor, width: int, samplings: Sequence[Sampling], draws: Sequence[float]
) -> tuple[list[int], list[bool]]:
    """Sample among the `width` most likely tokens; also tell for each row if these were enough."""
    vocab, device = values.shape[1], values.device
    best = values.topk(width, -1) if width < vocab else values.sort(stable=True, dim=-1, descending=True)
    table = [(s.top_k or vocab, s.top_p, s.min_p, draw) for s, draw in zip(samplings, draws, strict=True)]
    columns = torch.tensor(table, dtype=torch.float64, device=device)
    top_k, top_p, min_p, draw = (column[:, None] for column in columns.unbind(1))
    top = best[0][:, :1]
    weights = _weights(best[0], samplings, top).double()
    weights = torch.where(torch.arange(width, device=device) < top_k, weights, 0.0)
    reached = weights.cumsum(-1)
    mass = reached[:, -1:]
    if width < vocab and any(s.top_p < 1 and not 0 < s.top_k <= width for s in samplings):
        mass = torch.where(
            top_k <= width, mass, _weights(values, samplings, top).sum(-1, True, dtype=torch.float64)
        )
    kept = (reached - weights < top_p * mass) | (top_p >= 1)
    kept &= (weights > 0) & (weights >= min_p)
    kept[:, 0] = True
    enough = (top_k <= width) | ~kept[:, -1:] | (width == vocab)
    reached = torch.where(kept, weights, 0.0).cumsum(-1)
    place = _first_above(reached, (reached[:, -1:] * draw)[:, 0])
    place = torch.minimum(place, kept.sum(-1) - 1)
    found, is_enough = torch.stack((best[1].gather(1, place[:, None])[:, 0], enough[:, 0].long())).tolist()
    return found, [bool(value) for value in is_enough]


def _weights(values: Tensor, samplings: Sequence[Sampling], top: Tensor) -> Tensor:
    """Return probabilities relative to that of the most likely token, whose logit is `top` [rows, 1]."""
    heat = torch.tensor([[s.temperature] for s in samplings], device=values.device, dtype=values.dtype)
    return ((values - top) / heat).exp_()


def _first_above(sums: Tensor, goal: Tensor) -> Tensor:
    """Return, per row of ascending sums, the first index whose sum exceeds the goal."""
    return torch.searchsorted(sums, goal[:, None].contiguous(), right=True)[:, 0].clamp_max(sums.shape[1] - 1)
