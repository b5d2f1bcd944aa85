"""Language models: the captured step, its paged KV cache, and the engine that schedules sequences on it."""

from __future__ import annotations

from .engine import Engine
from .limits import EngineLimits
from .requests import Output, Request, Sampling, TokenLogprob
from .stats import EngineStats
from .step import StepShape, capture_step, probe, with_adapters
from .windows import Windows, is_step, window_outputs

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineStats",
    "Output",
    "Request",
    "Sampling",
    "StepShape",
    "TokenLogprob",
    "Windows",
    "capture_step",
    "is_step",
    "probe",
    "window_outputs",
    "with_adapters",
]
