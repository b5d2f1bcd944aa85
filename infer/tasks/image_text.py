"""Text about an image, as Hugging Face's image-to-text task has it: what the decoder begins with, and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..llm.engine.sampling.sampling_options import Sampling
from .answers import Answer

PIXELS = "pixel_values"
MAX_TOKENS = 256  # of a text for which nobody named a limit, as in transformers' pipeline


class ImageSource(NamedTuple):
    """Image that an encoder reads: channels, height and width, and the tokens with which the decoder begins.

    `prompt_replaces_start`: a prompt stands in place of those tokens, as of Donut, not behind them.
    """

    sizes: tuple[int, ...]
    start_ids: tuple[int, ...]
    prompt_replaces_start: bool

    @classmethod
    def of(cls, meta: Mapping[str, Any] | None) -> ImageSource | None:
        """Return the image that a model of this metadata reads; None for a model that writes no text about images."""
        source = ((meta or {}).get("generation") or {}).get("source") or {}
        if source.get("name") != PIXELS:
            return None
        replaces = bool((meta or {}).get("prompt_replaces_start"))
        return cls(tuple(source["features"]), tuple(source["start_ids"]), replaces)

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that the decoder begins with, those of a user's text among them."""
        return list(tokens) if tokens and self.prompt_replaces_start else [*self.start_ids, *tokens]

    def features(self, tensors: Mapping[str, np.ndarray], where: str) -> bytes:
        """Return one preprocessed image as the engine takes it; raise `InputError` for one of another size."""
        pixels = tensors[PIXELS][0]
        if pixels.shape != self.sizes:
            got, wanted = ("x".join(map(str, shape)) for shape in (pixels.shape, self.sizes))
            raise InputError(f"expected an image of {wanted} after preprocessing, got {got}", where=where)
        return np.ascontiguousarray(pixels, np.float32).tobytes()


def greedy(prompt: Sequence[int], context: int) -> Sampling:
    """Return greedy sampling, as transformers generates where nobody asks for samples, within the context."""
    return Sampling(temperature=0.0, max_tokens=max(1, min(MAX_TOKENS, context - len(prompt))))


def answer(text: str) -> Answer:
    """Return a text as transformers' pipeline does."""
    return {"generated_text": text.strip()}
