"""Fidelity: error of the optimized model against the float original, its gate, and the layers that cause it."""

from __future__ import annotations

from .accuracy_drop import drop, excess
from .gate import judge, violated
from .metrics import Comparison, compare
from .output_divergence import OutputDivergence
from .worst_layers import worst_layers

__all__ = ["Comparison", "OutputDivergence", "compare", "drop", "excess", "judge", "violated", "worst_layers"]
