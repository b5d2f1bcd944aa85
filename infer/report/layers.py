"""The layers of a quantized model as rows: format, bits, what the format costs, why it is this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..spec import LayerChoice
from .document import Report
from .rendering.text_layout import Column

COLUMNS = (
    *(Column("layer"), Column("format")),
    *(Column("bits", right=True), Column("weight error", right=True), Column("effect", right=True)),
    Column("why"),
)
BRIEF, BRIEFEST = 12, 3  # layers, where measurements or a budget chose their formats and where they did not


def cells(layer: LayerChoice, *, effects: bool = True) -> tuple[str, ...]:
    """Return the texts under `COLUMNS`; the effects of the chosen format and of the others are those of one layer."""
    error = "" if layer.weight_error is None else f"{layer.weight_error:.4f}"
    own = layer.effect.get(layer.format)
    others = ", ".join(
        f"{name} {value:.2g}" for name, value in layer.effect.items() if name != layer.format and value
    )
    why = "; ".join(part for part in (layer.why, f"alone: {others}" if others and effects else "") if part)
    return layer.name, layer.format, f"{layer.bits:.2f}", error, "" if own is None else f"{own:.3g}", why


def _has_chosen_formats(report: Report) -> bool:
    """Return True when measurements or a budget chose the formats of layers."""
    return any(
        layer.effect or (layer.by and layer.format not in ("float", report.plan.quant))
        for layer in report.layers
    )


def most_costly(report: Report) -> list[LayerChoice]:
    """Return a few layers in order: those with the largest effect, then not in the format asked, then weight error."""
    keep = BRIEF if _has_chosen_formats(report) else BRIEFEST

    def weight(layer: LayerChoice) -> tuple[float, bool, float]:
        error = layer.weight_error
        left = error is not None and layer.format != report.plan.quant
        return layer.effect.get(layer.format, 0.0), left, error or 0.0

    chosen = {layer.name for layer in sorted(report.layers, key=weight, reverse=True)[:keep]}
    return [layer for layer in report.layers if layer.name in chosen]


def counts(layers: Sequence[LayerChoice]) -> str:
    """Count layers by format: `31 nf4, 20 int8, 5 float`."""
    return ", ".join(
        f"{count} {format}" for format, count in Counter(layer.format for layer in layers).most_common()
    )
