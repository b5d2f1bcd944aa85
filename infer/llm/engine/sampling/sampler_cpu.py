"""Sampling and logprobs of single rows on a CPU, in numpy: reference of the native sampler, used without a compiler.

Most of the time goes into finding the largest logits. The k-th largest of the maxima of a row's blocks is at most its
k-th largest logit, so one cheap pass leaves few candidates, and only those are sorted. Ties go to the lower id.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ..requests import TokenLogprob

Row = np.ndarray  # float32 [vocab]
BLOCK = 64
CANDIDATES = 256  # enough for most cuts by mass; where they are not, the whole row is sorted
_SUM = 256  # weights are added up in blocks first


def candidates(row: Row, count: int) -> np.ndarray:
    """Return ids of at least the `count` largest logits, int64, most likely first."""
    whole = len(row) // BLOCK * BLOCK
    if whole // BLOCK <= count:
        return np.argsort(-row, kind="stable")
    tops = row[:whole].reshape(-1, BLOCK).max(1)
    border = np.partition(tops, len(tops) - count)[len(tops) - count]
    ids = np.flatnonzero(row >= border)
    return ids[np.argsort(-row[ids], kind="stable")]


def weights(row: Row, top: float, temperature: float) -> np.ndarray:
    """Return probabilities relative to that of the most likely token, float32 [vocab]."""
    found = row - np.float32(top)
    if temperature != 1:
        found /= np.float32(temperature)
    return np.exp(found, out=found)


def choose(logits: Tensor, columns: np.ndarray) -> list[int]:
    """Sample a token of each row of float32 [rows, vocab], -1 where the largest is not finite, as `cpu.sample` does.

    `columns`: see `sampler.sampling_columns`.
    """
    rows = logits.numpy()
    best = rows.argmax(-1)  # twenty times as fast as torch's
    tops = rows[np.arange(len(rows)), best]
    tokens: list[int] = np.where(np.isfinite(tops), best, -1).tolist()
    for i in np.flatnonzero((columns[:, 0] > 0) & np.isfinite(tops)).tolist():
        tokens[i] = _draw(rows[i], float(tops[i]), *columns[i].tolist())
    return tokens


def _draw(row: Row, top: float, heat: float, top_k: float, top_p: float, min_p: float, place: float) -> int:
    """Return the token at `place` in [0, 1) of the cumulative distribution that top_k, top_p and min_p leave."""
    vocab = len(row)
    if 0 < top_k < vocab or top_p < 1 or min_p > 0:
        return _draw_cut(row, top, heat, int(top_k), top_p, min_p, place)
    mass = weights(row, top, heat)
    short = -vocab % _SUM
    blocks = (np.pad(mass, (0, short)) if short else mass).reshape(-1, _SUM)
    reached = blocks.sum(1).cumsum(dtype=np.float64)
    goal = reached[-1] * place
    block = min(int(reached.searchsorted(goal, side="right")), len(blocks) - 1)
    return block * _SUM + _at(
        blocks[block].cumsum(dtype=np.float64), goal - (reached[block - 1] if block else 0.0)
    )


def _draw_cut(row: Row, top: float, heat: float, top_k: int, top_p: float, min_p: float, place: float) -> int:
    top_k = top_k if 0 < top_k < len(row) else 0
    if top_k:
        ids = candidates(row, top_k)[:top_k]
    elif top_p < 1:
        ids = candidates(row, CANDIDATES)
    else:
        ids = np.flatnonzero(row >= top + heat * math.log(min_p) - 1e-3)
        ids = ids[np.argsort(-row[ids], kind="stable")]
    mass = np.exp((row[ids].astype(np.float64) - top) / heat)
    if top_p < 1:
        total = mass.sum() if top_k else float(weights(row, top, heat).sum(dtype=np.float64))
        count = _nucleus(mass, top_p * total)
        if count == len(mass) and not top_k and count < len(row):
            ids = np.argsort(-row, kind="stable")
            mass = np.exp((row[ids].astype(np.float64) - top) / heat)
            count = _nucleus(mass, top_p * mass.sum())
        mass = mass[:count]
    if min_p > 0:
        mass = mass[: max(int((mass >= min_p).sum()), 1)]
    reached = mass.cumsum()
    return int(ids[_at(reached, reached[-1] * place)])


def _nucleus(mass: np.ndarray, goal: float) -> int:
    """Count the most likely tokens that are needed to reach a mass."""
    return min(int(mass.cumsum().searchsorted(goal, side="left")) + 1, len(mass))


def _at(reached: np.ndarray, goal: float) -> int:
    """Return the first index whose sum exceeds the goal.

    Rounding may lead past the last token with any weight; then that token is returned.
    """
    place = int(reached.searchsorted(goal, side="right"))
    return place if place < len(reached) else int(reached.searchsorted(reached[-1], side="left"))


def score(row: Row, token: int, number: int) -> TokenLogprob:
    """Return the logprob of a token, and of the `number` most likely ones."""
    top = float(row.max())
    whole = top + math.log(float(weights(row, top, 1.0).sum(dtype=np.float64)))
    if not number:
        return TokenLogprob(token, float(row[token]) - whole)
    ids = candidates(row, number)[:number]
    values = row[ids].astype(np.float64) - whole
    return TokenLogprob(
        token, float(row[token]) - whole, tuple(zip(ids.tolist(), values.tolist(), strict=True))
    )
