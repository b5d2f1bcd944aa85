"""What the inputs of each layer look like on real data: largest value, mean square per column, a histogram.

Each layer keeps one vector and one histogram, so memory doesn't grow with the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SourceError, UsageError
from ._sites import LAYERS

BINS = 2048
LEVELS = 127


@dataclass
class LayerStats:
    """`infer.quant.Stats`. The histogram counts |x| in `BINS` bins of `[0, top]`; `top` doubles as needed."""

    absmax: Tensor
    square_sum: Tensor  # float64 [columns]
    num_rows: int
    histogram: Tensor  # float64 [BINS]
    top: float

    @property
    def square_mean(self) -> Tensor:
        return (self.square_sum / max(self.num_rows, 1)).float()

    @property
    def clip(self) -> Tensor:
        """The bound whose int8 grid has the least squared error: uniform noise inside, the excess outside."""
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
        """rows float32 [count, columns]."""
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

    def _widen(self, largest: float) -> None:
        if self.top == 0 and largest > 0:
            self.top = 2.0 ** torch.tensor(largest).log2().ceil().item()
        while largest > self.top:
            merged = self.histogram.reshape(-1, 2).sum(1)
            self.histogram = torch.cat([merged, torch.zeros_like(merged)])
            self.top *= 2


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, LayerStats]:
    """Run `model` on each batch (by keyword) and return what every Linear and Conv2d saw, by layer name.

    A layer that no input reached is absent. Raises `UsageError` without batches, `SourceError` when a layer's
    input isn't finite.
    """
    stats: dict[str, LayerStats] = {}
    layers = [
        (n, m) for n, m in model.named_modules() if isinstance(m, LAYERS) and not isinstance(m, nn.Embedding)
    ]
    handles = [m.register_forward_pre_hook(partial(_see, stats, name)) for name, m in layers]
    training = model.training
    count = 0
    try:
        model.eval()
        for batch in batches:
            model(**batch)
            count += 1
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if not count:
        raise UsageError("there are no inputs to calibrate with", hint="Give them with --data")
    return stats


def _see(stats: dict[str, LayerStats], name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    rows = _rows(layer, args[0]).detach().float().cpu()
    if not bool(torch.isfinite(rows.sum(dtype=torch.float64))):
        raise SourceError(f"calibration gives NaN or infinity at the input of {name!r}")
    if name not in stats:
        square = torch.zeros(rows.shape[1], dtype=torch.float64)
        stats[name] = LayerStats(torch.zeros(()), square, 0, torch.zeros(BINS, dtype=torch.float64), 0.0)
    stats[name].add(rows)


def _rows(layer: nn.Module, x: Tensor) -> Tensor:
    """One column per input feature, or per input channel of a convolution."""
    if isinstance(layer, nn.Conv2d):
        return x.movedim(-3, -1).reshape(-1, x.shape[-3])
    return x.reshape(-1, x.shape[-1])
