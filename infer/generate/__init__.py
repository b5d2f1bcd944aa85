"""Language models: the captured step, its paged KV cache, and the engine that schedules sequences on it.

Names are imported when they are asked for: who serves a model of another process needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine
    from .limits import EngineLimits
    from .probing import probe
    from .requests import Output, Request, Sampling, TokenLogprob
    from .stats import EngineStats
    from .step import StepShape, capture_step, with_adapters
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

_HOMES = {
    "engine": ("Engine",),
    "limits": ("EngineLimits",),
    "probing": ("probe",),
    "requests": ("Output", "Request", "Sampling", "TokenLogprob"),
    "stats": ("EngineStats",),
    "step": ("StepShape", "capture_step", "with_adapters"),
    "windows": ("Windows", "is_step", "window_outputs"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
