"""Language models: the captured step, its paged KV cache, and the engine that schedules sequences on it."""

from __future__ import annotations

from .step import StepShape, capture_step, probe
from .windows import Windows, is_step, window_outputs

__all__ = ["StepShape", "Windows", "capture_step", "is_step", "probe", "window_outputs"]
