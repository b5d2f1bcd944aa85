"""Mixed precision: assignment of formats to layers by their effect on output, size and time."""

from __future__ import annotations

from .assignment import Assignment, CalibrationSet, collect_statistics
from .choose_formats import decide
from .fallback import raise_formats
from .format_order import smallest_format
from .layer_calls import CallCounter
from .layer_sums import LayerSums, layers_alone
from .lowered_layers import SharedFloatLayers

__all__ = [
    "Assignment",
    "CalibrationSet",
    "CallCounter",
    "LayerSums",
    "SharedFloatLayers",
    "collect_statistics",
    "decide",
    "layers_alone",
    "raise_formats",
    "smallest_format",
]
