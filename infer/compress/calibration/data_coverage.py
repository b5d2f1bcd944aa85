"""Coverage of the calibration data: rows and tokens, layers reached, values clipped by a static scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ...spec import Finding
from ..layer_kinds import is_layer, is_looked_up
from .expert_statistics import expert_findings
from .layer_statistics import LayerStats

STAGE = "calibrate"


def coverage(
    model: nn.Module, stats: Mapping[str, LayerStats], batches: Sequence[Mapping[str, Tensor]]
) -> list[Finding]:
    """Report rows, tokens, share of layers reached, and the share of values beyond the clip of int8:static."""
    first = [next(iter(batch.values())) for batch in batches]
    rows = sum(len(value) for value in first)
    layers = {n for n, m in model.named_modules() if is_layer(m) and not is_looked_up(m)}
    missed = sorted(layers - stats.keys())
    why = f"of {len(layers)}" + (f"; not reached: {', '.join(missed[:5])}" if missed else "")
    products = {n: seen for n, seen in stats.items() if isinstance(seen, LayerStats) and not seen.is_lookup}
    beyond = {name: saturation(seen) for name, seen in products.items()}
    worst = max(beyond, key=lambda name: beyond[name], default="")
    mean = sum(beyond.values()) / max(len(beyond), 1)
    return [
        Finding(STAGE, "rows", rows, "rows", f"{_tokens(batches)} tokens or values of the first input"),
        Finding(STAGE, "layers reached", len(layers) - len(missed), "layers", why),
        Finding(STAGE, "saturation", mean, "share", f"mean of values beyond a static step; most at {worst}"),
        Finding(STAGE, "worst saturation", beyond.get(worst, 0.0), "share", worst),
        *expert_findings(stats),
    ]


def saturation(seen: LayerStats) -> float:
    """Return the share of a layer's inputs that an int8 grid over ±clip would clip."""
    total = float(seen.histogram.sum())
    if total == 0 or seen.top == 0:
        return 0.0
    first = min(int(float(seen.clip) / seen.top * len(seen.histogram)) + 1, len(seen.histogram))
    return float(seen.histogram[first:].sum()) / total


def _tokens(batches: Sequence[Mapping[str, Tensor]]) -> int:
    """Count real tokens where there is a mask, else the values of the first input."""
    return sum(
        int(batch["attention_mask"].sum())
        if "attention_mask" in batch
        else next(iter(batch.values())).numel()
        for batch in batches
    )
