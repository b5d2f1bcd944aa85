"""Share of a model's weights that is quantized; float weights by kind of layer and reason.

`Coverage` is filled by a walk over the layers of a torch model (`compress.weight_coverage.cover`), or over the
initializers of an ONNX file; `enforce` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import GateError
from .plan import Plan
from .spec import Finding

STAGE = "compress"
LEAST = 0.1  # of the weights; below it an artifact may not be named after its format unasked
MOST_NAMED = 4  # kinds of layers in a refusal


@dataclass
class FloatWeights:
    """Float weights of one kind of layer; `reasons` counts the values by reason."""

    values: int = 0
    num_bytes: int = 0
    pinned: int = 0  # values that are float because the user pinned for it
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Most frequent reason by values, and the number of other reasons."""
        first = max(self.reasons, key=lambda reason: self.reasons[reason])
        others = len(self.reasons) - 1
        return first + (f" (and {others} more reason{'s' * (others > 1)})" if others else "")


@dataclass
class Coverage:
    """Counts of values by format, and of float ones by kind of layer."""

    formats: dict[str, int] = field(default_factory=dict)
    quantized_bytes: int = 0  # that the quantized values took as floats
    left: dict[str, FloatWeights] = field(default_factory=dict)

    def add_quantized(self, format: str, values: int, num_bytes: int) -> None:
        """Add quantized values; `num_bytes` is their size before."""
        self.formats[format] = self.formats.get(format, 0) + values
        self.quantized_bytes += num_bytes

    def add_left(self, kind: str, values: int, num_bytes: int, reason: str, *, pinned: bool = False) -> None:
        left = self.left.setdefault(kind, FloatWeights())
        left.values += values
        left.num_bytes += num_bytes
        left.pinned += values if pinned else 0
        left.reasons[reason] = left.reasons.get(reason, 0) + values

    @property
    def quantized_values(self) -> int:
        return sum(self.formats.values())

    @property
    def total_values(self) -> int:
        return self.quantized_values + sum(left.values for left in self.left.values())

    @property
    def share(self) -> float:
        """Quantized share of all weights, by number of values."""
        return self.quantized_values / max(self.total_values, 1)

    @property
    def share_of_bytes(self) -> float:
        """Quantized share of the bytes that all weights took as floats."""
        total = self.quantized_bytes + sum(left.num_bytes for left in self.left.values())
        return self.quantized_bytes / max(total, 1)

    @property
    def share_of_unpinned(self) -> float:
        """Quantized share of the weights not pinned to float; 1 when there are none."""
        pinned = sum(left.pinned for left in self.left.values())
        open_values = self.total_values - pinned
        return self.quantized_values / open_values if open_values else 1.0

    def verdict(self) -> str:
        """Format the share: `94 % of the weights are int8`; with several formats the share of each."""
        total = max(self.total_values, 1)
        if len(self.formats) == 1:
            return f"{percent(self.share)} of the weights are {next(iter(self.formats))}"
        ranked = sorted(self.formats.items(), key=lambda item: -item[1])
        each = ", ".join(f"{percent(values / total)} {format}" for format, values in ranked)
        return f"{percent(self.share)} of the weights are quantized" + (f" ({each})" if each else "")

    def findings(self) -> list[Finding]:
        """List the share, then the float weights, most values first, for display."""
        why = (
            f"{self.verdict()}; {count(self.quantized_values)} of {count(self.total_values)} values, "
            f"{percent(self.share_of_bytes)} of their bytes as floats"
        )
        rows = [Finding(STAGE, "share quantized", self.share, "share", why)]
        return rows + [
            Finding(STAGE, f"stays float: {kind}", left.values, "weights", left.reason)
            for kind, left in self._ranked()
        ]

    def _ranked(self) -> list[tuple[str, FloatWeights]]:
        return sorted(self.left.items(), key=lambda item: -item[1].values)

    def refusal(self) -> str | None:
        """Return the reason when too small a share is quantized, naming the layers that hold the rest."""
        if self.share_of_unpinned >= LEAST:
            return None
        rest = [(kind, left) for kind, left in self._ranked() if left.values > left.pinned]
        held = "; ".join(
            f"{kind}: {count(left.values)} weights stay float, {left.reason}"
            for kind, left in rest[:MOST_NAMED]
        )
        more = f"; and {len(rest) - MOST_NAMED} more kinds of layers" if len(rest) > MOST_NAMED else ""
        return f"only {self.verdict()}, expected at least {percent(LEAST)}; {held}{more}"


def enforce(coverage: Coverage, plan: Plan) -> None:
    """Raise `GateError` when less than a tenth of the weights is quantized and the plan does not allow it."""
    if plan.quant == "none" or plan.allow_partial:
        return
    if reason := coverage.refusal():
        raise GateError(
            f"refused, {reason}",
            hint="Nothing was published. --allow-partial keeps the result all the same, "
            "--quant none makes a float artifact",
        )


def count(values: int) -> str:
    """Format a count: `1.2 M`, `340 k`, `57`."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if values >= scale:
            return f"{values / scale:.3g} {unit}"
    return str(values)


def percent(share: float) -> str:
    """Format a share: `94 %`; never rounded to 0 or 100."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    value = 100 * share
    if value < 10:
        return f"{max(value, 0.01):.2g} %"
    return f"{value:.0f} %" if value < 99 else f"{min(value, 99.99):.4g} %"
