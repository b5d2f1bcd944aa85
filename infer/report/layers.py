"""The layers of a quantized model as rows: format, bits, what the format costs, why it is this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..spec import LayerChoice
from .document import Report

HEADS = ("layer", "format", "bits", "weight error", "effect", "why")
BRIEF = 12


def cells(layer: LayerChoice, *, effects: bool = True) -> tuple[str, ...]:
    """Return the texts under `HEADS`; the effects of the chosen format and of the others are those of one layer."""
    error = "" if layer.weight_error is None else f"{layer.weight_error:.4f}"
    own = layer.effect.get(layer.format)
    others = ", ".join(
        f"{name} {value:.2g}" for name, value in layer.effect.items() if name != layer.format and value
    )
    why = "; ".join(part for part in (layer.why, f"alone: {others}" if others and effects else "") if part)
    return layer.name, layer.format, f"{layer.bits:.2f}", error, "" if own is None else f"{own:.3g}", why


def has_chosen_formats(report: Report) -> bool:
    """Return True when measurements or a budget chose the formats of layers."""
    return any(
        layer.effect or (layer.by and layer.format not in ("float", report.plan.quant))
        for layer in report.layers
    )


def most_costly(layers: Sequence[LayerChoice], asked: str = "", keep: int = BRIEF) -> list[LayerChoice]:
    """Return at most `keep` layers in order: those with the largest effect, then those not in format `asked`."""

    def weight(layer: LayerChoice) -> tuple[float, bool]:
        return layer.effect.get(layer.format, 0.0), layer.weight_error is not None and layer.format != asked

    chosen = {layer.name for layer in sorted(layers, key=weight, reverse=True)[:keep]}
    return [layer for layer in layers if layer.name in chosen]


def counts(layers: Sequence[LayerChoice]) -> str:
    """Count layers by format: `31 nf4, 20 int8, 5 float`."""
    return ", ".join(
        f"{count} {format}" for format, count in Counter(layer.format for layer in layers).most_common()
    )
