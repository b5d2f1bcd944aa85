"""Fidelity: how near the optimized model is to the float original, whether that is enough, and where not."""

from __future__ import annotations

from .accuracy_drop import drop, excess
from .effect import Effect
from .gate import judge
from .metrics import Comparison, compare
from .worst_layers import worst_layers

__all__ = ["Comparison", "Effect", "compare", "drop", "excess", "judge", "worst_layers"]
