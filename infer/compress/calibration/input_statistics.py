"""Calibration statistics of each layer's input: absolute maximum, mean square per column, histogram.

Each layer keeps one vector and one histogram, so memory doesn't grow with the data; when products of columns are asked
for (`hessian`), a square of numbers too, in blocks along its diagonal where all of it has no room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import library_errors
from ...errors import SourceError, UsageError
from ...load.expert_layers import ExpertLinear
from ..layer_kinds import CONVOLUTIONS, is_layer, is_looked_up, is_product, pair, product_input, rows_of
from .expert_statistics import record_experts
from .gptq import Factor, factor
from .smoothquant import Balance, balance, balance_rows

BINS = 2048
LEVELS = 127
# Room for the Hessians of all layers together, and the widest block of one: its factors are made in float64.
HESSIAN_BYTES, WIDEST, NARROWEST = 1 << 30, 4096, 64
MASK = "attention_mask"
# Input rows kept of each Linear, and of one call.
KEPT, KEPT_OF_CALL = 128, 16
TINY = torch.finfo(torch.float32).tiny
NONFINITE = "The inputs of --data are not finite, or the model overflows on them: check both in float"


@dataclass
class LayerStats:
    """Implementation of `compress.Stats`: a histogram of |x| in `BINS` bins of `[0, top]`; `top` doubles as needed."""

    absmax: Tensor
    square_sum: Tensor  # float64 [columns]
    num_rows: int
    histogram: Tensor  # float64 [BINS]
    top: float
    # float32 [W, W] sums of outer products, along the diagonal, and what becomes of them.
    hessians: list[Tensor] = field(default_factory=list)
    made: list[Factor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # a few of the input rows of a Linear
    balance: Balance | None | Literal["unknown"] = (
        "unknown"  # decided once for all blocks of rows of a weight
    )
    # The weights of all Linear layers that read the same input, and how those are balanced together.
    readers: list[Tensor] = field(default_factory=list)
    shared: Balance | None | Literal["unknown"] = "unknown"
    result: LayerStats | None = None  # of what a convolution gives, which may be added to in int8

    @property
    def square_mean(self) -> Tensor:
        return (self.square_sum / max(self.num_rows, 1)).float()

    def importance(self, columns: int) -> Tensor | None:
        """Return the importance float32 [columns] of a weight of so many; None for grouped convolutions."""
        taps, rest = divmod(columns, len(self.square_sum))
        return None if rest or not taps else self.square_mean.repeat_interleave(taps)

    def factors(self, columns: int) -> list[Factor]:
        """Return the GPTQ factors of a weight of so many columns; empty when Hessians were not collected.

        They take the place of the Hessians.
        """
        while self.hessians:
            start = self.made[-1].stop if self.made else 0
            self.made.append(factor(start, self.hessians.pop(0)))
        return self.made if self.made and self.made[-1].stop == columns else []

    @property
    def clip(self) -> Tensor:
        """Clipping bound whose int8 grid has the least squared error: uniform noise inside, the excess outside."""
        if self.top == 0:
            return torch.zeros(())
        centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (self.top / BINS)
        bounds = float(self.absmax) * torch.linspace(0.1, 1.0, 91, dtype=torch.float64)
        inside = torch.searchsorted(centres, bounds)
        count = torch.cat([torch.zeros(1, dtype=torch.float64), self.histogram.cumsum(0)])[inside]
        noise = count * (bounds / LEVELS).square() / 12
        excess = (centres - bounds[:, None]).clamp_min(0).square() @ self.histogram
        return bounds[(noise + excess).argmin()].float()

    def add(self, rows: Tensor) -> None:
        """Add input rows float32 [count, columns] to the statistics."""
        if rows.numel() == 0:
            return
        magnitude = rows.abs()
        largest = float(magnitude.max())
        self.absmax = self.absmax.clamp_min(largest)
        self.square_sum += rows.square().sum(0, dtype=torch.float64)
        self.num_rows += rows.shape[0]
        self._widen(largest)
        if self.top > 0:
            self.histogram += torch.histc(magnitude, BINS, 0.0, self.top).double()

    def keep(self, rows: Tensor) -> None:
        """Keep some of rows float32 [count, columns], spread evenly, until there are `KEPT`."""
        room = min(KEPT - sum(map(len, self.kept)), KEPT_OF_CALL)
        if room > 0 and len(rows):
            self.kept.append(rows[:: max(len(rows) // room, 1)][:room].clone())

    def balanced(self, weight: Tensor) -> Balance | None:
        """Return the SmoothQuant balance for a Linear weight float32 [rows, columns]; None without gain.

        The first block of rows decides for all.
        """
        if self.balance == "unknown":
            rows = torch.cat(self.kept) if self.kept else torch.empty(0, weight.shape[1])
            self.balance = balance(rows, weight, (self.clip / LEVELS).clamp_min(TINY))
        return self.balance

    def balanced_together(self) -> Balance | None:
        """Return one SmoothQuant balance of dynamic int8 for all layers that read this input, or None."""
        if self.shared == "unknown":
            rows = torch.cat(self.kept) if self.kept and self.readers else torch.empty(0, 0)
            feedback = bool(self.hessians or self.made)
            self.shared = balance_rows(rows, self.readers, feedback=feedback)
            self.readers = []
        return self.shared

    def add_products(self, rows: Tensor, width: int) -> None:
        """Add the products of rows float32 [count, K], in diagonal blocks of `width` columns."""
        parts = rows.split(width, 1)
        if not self.hessians:
            self.hessians = [torch.zeros((p.shape[1], p.shape[1])) for p in parts]
        for hessian, part in zip(self.hessians, parts, strict=True):
            hessian.addmm_(part.t(), part)

    def _widen(self, largest: float) -> None:
        if self.top == 0 and largest > 0:
            self.top = 2.0 ** torch.tensor(largest).log2().ceil().item()
        while largest > self.top:
            merged = self.histogram.reshape(-1, 2).sum(1)
            self.histogram = torch.cat([merged, torch.zeros_like(merged)])
            self.top *= 2


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, hessian: bool = False
) -> dict[str, LayerStats]:
    """Run `model` on each batch (by keyword) and return the statistics of every layer with a product, by name.

    `hessian` adds what error feedback needs. Tokens that an input `attention_mask` hides don't count. A layer that no
    input reached is absent. Raises `UsageError` without batches, `SourceError` when a layer's input isn't finite.
    """
    stats: dict[str, LayerStats] = {}
    layers = [(n, m) for n, m in model.named_modules() if is_layer(m) and not is_looked_up(m)]
    width = hessian_width([m for _, m in layers]) if hessian else 0
    mask: list[Tensor | None] = [None]
    handles = [
        m.register_forward_pre_hook(partial(_record_input, stats, name, width, mask)) for name, m in layers
    ]
    convolutions = [(name, m) for name, m in layers if isinstance(m, CONVOLUTIONS)]
    handles += [m.register_forward_hook(partial(_record_output, stats, name)) for name, m in convolutions]
    training = model.training
    count = 0
    try:
        model.eval()
        for batch in batches:
            mask[0] = batch.get(MASK)
            with library_errors.float_model_errors():
                model(**batch)
            count += 1
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if not count:
        raise UsageError("there are no inputs to calibrate with", hint="Give them with --data")
    _find_readers(stats, {n: rows_of(m) for n, m in layers if is_product(m)})
    return stats


def _find_readers(stats: Mapping[str, LayerStats], weights: Mapping[str, Tensor]) -> None:
    """Find the layers that read the same input, by equality of the values they saw."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in weights.keys() & stats.keys():
        seen = stats[name]
        key = (seen.num_rows, float(seen.absmax), seen.square_sum.numpy().tobytes())
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        readers = [weights[name] for name in sorted(names) if not weights[name].is_meta]
        for name in names:
            stats[name].readers = readers


def hessian_width(layers: Iterable[nn.Module]) -> int:
    """Return the columns of a Hessian block, equal for all layers: the largest power of two that fits in memory."""
    columns = [_columns(layer) for layer in layers if not isinstance(layer, ExpertLinear)]
    width = WIDEST
    while width > NARROWEST and sum(k * min(k, width) * 4 for k in columns) > HESSIAN_BYTES:
        width //= 2
    return width


def _columns(layer: nn.Module) -> int:
    return rows_of(layer)[0].numel()


def _record_input(
    stats: dict[str, LayerStats],
    name: str,
    width: int,
    mask: list[Tensor | None],
    layer: nn.Module,
    args: tuple[Any, ...],
) -> None:
    if isinstance(layer, ExpertLinear):
        record_experts(stats, name, mask[0], layer, args)
        return
    rows = _rows(layer, args[0], mask[0]).detach().float().cpu()
    if not bool(torch.isfinite(rows.sum(dtype=torch.float64))):
        raise SourceError(
            f"expected finite values in calibration, got NaN or infinity at the input of {name!r}",
            hint=NONFINITE,
        )
    if name not in stats:
        stats[name] = _empty(rows.shape[1])
    stats[name].add(rows)
    if is_product(layer):
        stats[name].keep(rows)
    if width and is_product(layer):
        stats[name].add_products(rows, width)
    elif width and isinstance(layer, CONVOLUTIONS) and layer.groups == 1:
        stats[name].add_products(_patches(layer, args[0].detach().float().cpu()), width)


def _empty(columns: int) -> LayerStats:
    square, histogram = (torch.zeros(count, dtype=torch.float64) for count in (columns, BINS))
    return LayerStats(torch.zeros(()), square, 0, histogram, 0.0)


def _record_output(
    stats: dict[str, LayerStats], name: str, layer: nn.Module, args: tuple[Any, ...], result: Tensor
) -> None:
    rows = _rows(layer, result, None).detach().float().cpu()
    if not bool(torch.isfinite(rows.sum(dtype=torch.float64))):
        raise SourceError(
            f"expected finite values in calibration, got NaN or infinity at the output of {name!r}",
            hint=NONFINITE,
        )
    found = stats[name]
    found.result = found.result or _empty(rows.shape[1])
    found.result.add(rows)


def _rows(layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Reshape an input to one column per input feature, or per input channel of a convolution."""
    if isinstance(layer, CONVOLUTIONS):
        channels = -2 if isinstance(layer, nn.Conv1d) else -3
        return x.movedim(channels, -1).reshape(-1, x.shape[channels])
    x = product_input(layer, x)
    rows = x.reshape(-1, x.shape[-1])
    if mask is None or x.shape[:-1].numel() != mask.numel() or x.shape[0] not in (len(mask), mask.numel()):
        return rows
    return rows[mask.reshape(-1).bool()]


def _patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Unfold the input of a convolution to the rows of its product: [outputs, I * kh * kw]."""
    if isinstance(layer, nn.Conv1d):
        x = x.unsqueeze(-2)
    batch = x if x.dim() == 4 else x[None]
    if isinstance(layer.padding, str):
        batch = F.pad(batch, layer._reversed_padding_repeated_twice)
    padding = (0, 0) if isinstance(layer.padding, str) else pair(layer.padding, 0)
    size, dilation, stride = pair(layer.kernel_size, 1), pair(layer.dilation, 1), pair(layer.stride, 1)
    columns = F.unfold(batch, size, dilation, padding, stride)
    return columns.transpose(1, 2).reshape(-1, columns.shape[1])
