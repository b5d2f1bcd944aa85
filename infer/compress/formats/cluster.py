"""Clustering (palettization): codes of 2, 3, 4 or 6 bits into a codebook learned for each 32 rows of a weight.

    --quant cluster      4 bits
    --quant cluster:3    2, 3, 4 or 6 bits

Linear, Embedding and Conv2d; convolutions become smaller only.

Weights are divided by a signed scale for each 64 of them, as in nf4; the codebook is the exact one-dimensional
k-means of what is left, each value weighted by its scale squared and, with calibration, by the mean square of its
input; then scales are searched for that codebook. Moving its entries to their centroids and searching again would
take 0.1 % off the error for twice the time (measured on Gaussian, t(5) and MiniLM weights), so it isn't done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UsageError
from ...kernels.cpu import scale_search as native
from ...kernels.ops.bitpack import BITS, GROUP, TABLE_ROWS, pack
from ...plan import Plan
from ..calibration.group_scales import relative_importance
from ..coded_format import dequantize, embedding, experts, linear
from ..format_constraints import refuses_table_format
from ..kmeans import optimal_centres
from ..quantizer import Stats
from ..table_format import fit_calibrated

OPTIONS = ("", *map(str, BITS))
PRECISION_CLASS = {"": "4bit", "2": "2bit", "3": "3bit", "4": "4bit", "6": "int8"}
WEIGHT_ONLY = frozenset(OPTIONS)
NEEDS_STATS: frozenset[str] = frozenset()
ROWS = TABLE_ROWS
SHARED: frozenset[str] = frozenset()
DEFAULT_BITS = 4
# Histogram bins for each cluster: cuts lie on this grid, centroids are those of the values themselves.
BINS_PER_CLUSTER, MOST_BINS = 16, 512
PIECE = 1 << 21


def missing() -> str | None:
    return None


def explain_option(option: str) -> NoReturn | None:
    """Explain that 8 bits are not offered; other unknown options list the known ones."""
    if option == "8":
        raise UsageError(
            "cluster:8 gains nothing over int8, which is faster at the same size", hint="Use --quant int8"
        )
    return None


def refuses(layer: nn.Module, plan: Plan) -> str | None:
    return refuses_table_format(layer, "cluster", GROUP)


def quantize(weight: Tensor, stats: Stats | None, plan: Plan) -> dict[str, Tensor]:
    """Quantize float [N, …] with K values per row to codes and codebooks.

    Returns codes uint8 [N, K * bits / 8], table [N / 32, 2**bits], scale int8 [N, K/64], super_scale
    float32 [N].
    """
    weight = weight.reshape(weight.shape[0], -1)
    bits = int(plan.quant_option or DEFAULT_BITS)
    rows = max(PIECE // weight.shape[1] // TABLE_ROWS, 1) * TABLE_ROWS
    parts = [_quantize_piece(part.float(), bits, stats) for part in weight.split(rows)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _quantize_piece(weight: Tensor, bits: int, stats: Stats | None) -> dict[str, Tensor]:
    importance = None if stats is None else stats.importance(weight.shape[1])
    table = learn(weight, bits, relative_importance(importance, weight.shape[1]))
    codes, scale, row_scale = fit_calibrated(weight, table, stats)
    return {"codes": pack(codes, bits), "table": table, "scale": scale, "super_scale": row_scale}


def _sums(index: Tensor, weights: Tensor, num_tables: int, width: int) -> Tensor:
    """Sum the weights [R, …] by table and by index below `width`: float64 [T, width]."""
    offset = torch.arange(index.shape[0]) // TABLE_ROWS * width
    flat = (index + offset.reshape(-1, *[1] * (index.dim() - 1))).reshape(-1)
    return torch.bincount(flat, weights.reshape(-1).double(), minlength=num_tables * width).reshape(
        num_tables, width
    )


def learn(weight: Tensor, bits: int, importance: Tensor) -> Tensor:
    """Learn the optimal codebooks of weights divided by their group's largest, sign included: float32 [T, 2**bits].

    weight float32 [R, K], importance [K]. The native routine and `learn_slowly` give equal bits.
    """
    if native.why_not() is None:
        return native.codebooks(weight, importance, 2**bits, _num_bins(bits))
    return learn_slowly(weight, bits, importance)


def _num_bins(bits: int) -> int:
    return min(BINS_PER_CLUSTER * 2**bits, MOST_BINS)


def learn_slowly(weight: Tensor, bits: int, importance: Tensor) -> Tensor:
    """Learn in plain torch, as the reference of `learn`."""
    grouped = weight.reshape(weight.shape[0], -1, GROUP)
    scale = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    unit = grouped / torch.where(scale != 0, scale, 1)
    num_bins, num_tables = _num_bins(bits), -(-weight.shape[0] // TABLE_ROWS)
    mass = _relative_square(scale, num_tables) * importance.reshape(1, -1, GROUP)
    index = (unit * (num_bins // 2) + num_bins // 2).clamp_(0, num_bins - 1).to(torch.int64)
    masses = _sums(index, mass, num_tables, num_bins)
    moments = _sums(index, mass * unit, num_tables, num_bins)
    return _normalised(optimal_centres(masses, moments, 2**bits))


def _relative_square(scale: Tensor, num_tables: int) -> Tensor:
    """Return squared scales [R, G, 1] relative to the largest of the codebook, so that none overflows."""
    table = torch.arange(scale.shape[0]) // TABLE_ROWS
    top = torch.zeros(num_tables).scatter_reduce_(0, table, scale.abs().amax((1, 2)), "amax")
    top = top.clamp_min(torch.finfo(torch.float32).tiny)
    return (scale / top[table][:, None, None]).square()


def _normalised(table: Tensor) -> Tensor:
    top = table.abs().amax(1, keepdim=True)
    return (table / torch.where(top > 0, top, 1)).float()


def conv2d(
    x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Compute a convolution, decoding the weight at each call as rows of an embedding: smaller, not faster."""
    every = torch.arange(tensors["codes"].shape[0], device=x.device)
    weight = embedding(every, tensors).to(x.dtype).reshape(len(every), -1, *options["kernel_size"])
    last = (options["stride"], options["padding"], options["dilation"], options["groups"])
    return F.conv2d(x, weight, bias, *last)


__all__ = [
    "OPTIONS",
    "conv2d",
    "dequantize",
    "embedding",
    "experts",
    "linear",
    "missing",
    "quantize",
    "refuses",
]
