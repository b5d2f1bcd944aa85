"""Results of packing one weight and a whole model, and a cache of packed weights.

A `PackingCache` keeps what was packed once, for callers that try one assignment of formats after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...results import LayerResult
from ...spec import Finding
from ..layer_overrides import Format
from ..quantizable_layers import Weight
from .carried_codes import SourceCodes, SquaredError, source_findings

STAGE = "compress"


@dataclass
class Totals:
    """Sums over the quantized weights; bytes before are those of the weights as stored."""

    num_layers: int = 0
    num_weights: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    error: SquaredError = field(default_factory=SquaredError)

    @property
    def bits(self) -> float:
        """Bits per quantized weight, tables and scales included."""
        return self.bytes_after * 8 / max(self.num_weights, 1)


@dataclass(frozen=True)
class QuantizationResult:
    """Quantized layers of a model, in order, and refusal reasons of others, by layer name."""

    layers: tuple[LayerResult, ...]
    refused: Mapping[str, str]
    totals: Totals
    sources: tuple[SourceCodes, ...] = ()  # of the layers whose source is quantized

    def findings(self) -> list[Finding]:
        """List each layer, each refusal, and the sums, for display."""
        totals = self.totals
        return [
            *(layer.finding() for layer in self.layers),
            *source_findings(self.sources),
            *(Finding(STAGE, f"refused {name}", None, why=why) for name, why in self.refused.items()),
            Finding(
                STAGE, "layers quantized", totals.num_layers, "layers", f"{len(self.refused)} stay float"
            ),
            Finding(STAGE, "weights quantized", totals.num_weights, "weights"),
            Finding(
                STAGE,
                "bits per quantized weight",
                round(totals.bits, 4),
                "bits",
                "tables and scales included",
            ),
            Finding(
                STAGE, "weight error", totals.error.relative, "relative rms", "over all quantized weights"
            ),
            Finding(
                STAGE, "bytes before", totals.bytes_before, "bytes", "of the quantized weights, as stored"
            ),
            Finding(STAGE, "bytes after", totals.bytes_after, "bytes", "of the same weights, packed"),
        ]


@dataclass
class PackingResult:
    """Packed tensors of a weight, and their error."""

    tensors: dict[str, Tensor]
    error: SquaredError
    source: SourceCodes | None = None  # of a quantized source

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class PackingCache:
    """Cache of packed weights by (layer, format), up to `room` bytes."""

    room: int = 2 << 30
    held: dict[tuple[str, str], PackingResult] = field(default_factory=dict)

    def get(self, weight: Weight, format: Format, make: Callable[[], PackingResult]) -> PackingResult:
        key = (weight.name, format.name)
        if key in self.held:
            return self.held[key]
        packing = make()
        if packing.num_bytes <= self.room:
            self.held[key], self.room = packing, self.room - packing.num_bytes
        return packing
