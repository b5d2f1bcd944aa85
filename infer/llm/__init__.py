"""Language models: the captured step, its paged KV cache, and the engine that schedules sequences on it.

Names are imported when they are asked for: who serves a model of another process needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.engine import Engine
    from .engine.requests import Output, Request, TokenLogprob
    from .engine.sampling.sampling_options import Sampling
    from .engine.scheduling.engine_limits import EngineLimits
    from .engine.stats import EngineStats
    from .step.encoder_decoder.capture_encoder_decoder import capture_language_model
    from .step.encoder_decoder.encoder_decoder_probe import probe_encoder_decoder
    from .step.full_sequence_runner import FullSequenceRunner, full_sequence_outputs
    from .step.paged_step import capture_step, with_adapters
    from .step.probe import probe
    from .step.step_shape import StepShape

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineStats",
    "Output",
    "Request",
    "Sampling",
    "StepShape",
    "TokenLogprob",
    "FullSequenceRunner",
    "capture_language_model",
    "capture_step",
    "probe",
    "probe_encoder_decoder",
    "full_sequence_outputs",
    "with_adapters",
]

_NAMES_OF = {
    "engine.engine": ("Engine",),
    "engine.scheduling.engine_limits": ("EngineLimits",),
    "step.probe": ("probe",),
    "step.encoder_decoder.capture_encoder_decoder": ("capture_language_model",),
    "step.encoder_decoder.encoder_decoder_probe": ("probe_encoder_decoder",),
    "engine.requests": ("Output", "Request", "TokenLogprob"),
    "engine.sampling.sampling_options": ("Sampling",),
    "engine.stats": ("EngineStats",),
    "step.paged_step": ("capture_step", "with_adapters"),
    "step.step_shape": ("StepShape",),
    "step.full_sequence_runner": ("FullSequenceRunner", "full_sequence_outputs"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
