"""Mode of a language model: a step that generates, or scores of whole windows."""

from __future__ import annotations

from dataclasses import dataclass

from ..llm.step.step_shape import StepShape
from ..results import ScoresOnly


@dataclass(frozen=True)
class LlmMode:
    """Mode of a model: a step of that `shape` which generates, or the whole, of a language model with the reason."""

    shape: StepShape | None = None
    scores_only: ScoresOnly | None = None
    keeps_latents: bool = False  # in the cache, in place of keys and values
