"""Step of a language model as an engine calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class StepRunner(Protocol):
    """A step of a language model as a backend opens it."""

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the step on the inputs of `llm.step.paged_step`: {"logits": float32 [rows, vocab]}; writes the cache."""
