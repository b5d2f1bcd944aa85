"""Exact weighted k-means in one dimension, for many histograms at once.

In one dimension clusters are intervals, so the best ones follow by dynamic programming over prefixes (Wang & Song,
Ckmeans.1d.dp, R Journal 2011). The best last cut moves right with the prefix (Grønlund et al. 2017, arXiv
1701.07204), so each row is filled by divide and conquer: O(clusters * bins * log bins) instead of bins².
"""

from __future__ import annotations

import torch
from torch import Tensor


def optimal_centres(mass: Tensor, moment: Tensor, num_clusters: int) -> Tensor:
    """Return centres float64 [B, num_clusters], ascending, that minimise the sum of mass * (value - centre)².

    mass [B, H] is the weight in each bin and moment [B, H] its sum of weight * value; bins are in ascending order of
    value and H is a power of two. An empty cluster repeats the centre of its neighbour.
    """
    zero = torch.zeros((mass.shape[0], 1), dtype=torch.float64)
    masses = torch.cat([zero, mass.double().cumsum(1)], 1)
    moments = torch.cat([zero, moment.double().cumsum(1)], 1)
    best = _gain(moments.clone(), masses.clone())
    cuts = []
    for _ in range(num_clusters - 1):
        best, cut = _add_cluster(best, masses, moments)
        cuts.append(cut)
    edges = [torch.full((mass.shape[0], 1), mass.shape[1])]
    for cut in reversed(cuts):
        edges.append(cut.gather(1, edges[-1]))
    bounds = torch.cat([torch.zeros_like(edges[0]), *reversed(edges)], 1)
    return _centres(masses.gather(1, bounds).diff(dim=1), moments.gather(1, bounds).diff(dim=1))


def _gain(moment: Tensor, mass: Tensor) -> Tensor:
    """Return the squared error that a cluster saves against the centre 0."""
    return moment.square_() / mass.clamp_min_(torch.finfo(torch.float64).tiny)


def _centres(mass: Tensor, moment: Tensor) -> Tensor:
    centres = torch.where(mass > 0, moment / torch.where(mass > 0, mass, 1), -torch.inf).cummax(1).values
    lowest = torch.where(mass > 0, centres, torch.inf).amin(1, keepdim=True)
    return torch.maximum(centres, torch.where(lowest.isfinite(), lowest, 0))


def _add_cluster(best: Tensor, masses: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Extend the best gain of every prefix by one cluster; return gains and last cuts, both [B, H + 1]."""
    num_bins = best.shape[1] - 1
    gains, cuts = torch.zeros_like(best), torch.zeros(best.shape, dtype=torch.int64)
    state = torch.stack([best, masses, moments], -1).reshape(-1, 3)
    ends = torch.tensor([num_bins])
    low, high = torch.zeros_like(cuts[:, :1]), torch.full_like(cuts[:, :1], num_bins)
    gains[:, ends], cuts[:, ends] = _best_cuts(ends, low, high, state)
    stride = num_bins // 2
    while stride:
        ends = torch.arange(stride, num_bins, 2 * stride)
        low, high = cuts[:, ends - stride], torch.minimum(cuts[:, ends + stride], ends)
        gains[:, ends], cuts[:, ends] = _best_cuts(ends, low, high, state)
        stride //= 2
    return gains, cuts


def _best_cuts(ends: Tensor, low: Tensor, high: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best last cut within low…high [B, M] for prefixes ending at `ends` [M], and its gain.

    `state` [B * (H + 1), 3] holds the gain with one cluster less, the mass and the moment of each prefix. The ranges
    differ in length, so all candidates stand in one flat list.
    """
    num_batches = low.shape[0]
    base = (torch.arange(num_batches) * (len(state) // num_batches))[:, None]
    lengths = (high - low + 1).reshape(-1)
    node = torch.repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    cut = torch.arange(node.numel()) + ((low + base).reshape(-1) - first).index_select(0, node)
    before = state.index_select(0, cut)
    inside = state.index_select(0, (base + ends).reshape(-1)).index_select(0, node) - before
    value = before[:, 0] + _gain(inside[:, 2], inside[:, 1])
    top = torch.segment_reduce(value, "max", lengths=lengths)
    # Of equal ones the leftmost: what is the best cut must move right with the prefix.
    is_top = (value == top.index_select(0, node)).nonzero().reshape(-1)
    leftmost = torch.searchsorted(node.index_select(0, is_top), torch.arange(lengths.numel()))
    chosen = cut.index_select(0, is_top.index_select(0, leftmost))
    return top.reshape(low.shape), chosen.reshape(low.shape) - base
