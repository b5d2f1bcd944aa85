"""Text about an image, as Hugging Face's image-to-text task has it: the prompt, and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..llm.engine.sampling.sampling_options import Sampling
from .answers import Answer

PIXELS = "pixel_values"
ENDS = ("<s>", "</s>", "<pad>")
MAX_TOKENS = 256  # of a text for which nobody named a limit, as in transformers' pipeline


class ImageSource(NamedTuple):
    """Image that an encoder reads: channels, height and width, and the tokens with which the decoder begins.

    `prompt_replaces_start`: a prompt stands in place of those tokens, as of Donut, not behind them; `reads_text`: the
    encoder reads the prompt beside the image (Florence-2, BLIP's answers to questions); `task_prompts`: the text that
    stands for a task token.
    """

    sizes: tuple[int, ...]
    start_ids: tuple[int, ...]
    prompt_replaces_start: bool = False
    reads_text: bool = False
    task_prompts: Mapping[str, str] = {}

    @classmethod
    def of(cls, meta: Mapping[str, Any] | None) -> ImageSource | None:
        """Return the image that a model of this metadata reads; None for a model that writes no text about images."""
        source = ((meta or {}).get("generation") or {}).get("source") or {}
        if source.get("name") != PIXELS:
            return None
        replaces = bool((meta or {}).get("prompt_replaces_start"))
        prompts = dict((meta or {}).get("task_prompts") or {})
        reads_text = bool(source.get("vocab_size"))
        return cls(tuple(source["features"]), tuple(source["start_ids"]), replaces, reads_text, prompts)

    def text(self, given: str, where: str) -> str:
        """Return the text that a user's text stands for: a task token of Florence-2 has a sentence.

        Raises `InputError` for a text beside a token that takes none.
        """
        for token, sentence in self.task_prompts.items():
            if token not in given:
                continue
            rest = given.replace(token, "").strip()
            if rest and "{input}" not in sentence:
                raise InputError(f"the task {token} takes no text beside it, got {rest[:80]!r}", where=where)
            return sentence.replace("{input}", rest)
        return given

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Return the prompt of a request: what the encoder reads beside the image, or the decoder begins with."""
        if self.reads_text or (tokens and self.prompt_replaces_start):
            return list(tokens)
        return [*self.start_ids, *tokens]

    def greedy(self, prompt: Sequence[int], context: int) -> Sampling:
        """Return greedy sampling, as transformers generates where nobody asks for samples, within the context."""
        begun = self.start_ids if self.reads_text else prompt
        limit = max(1, min(MAX_TOKENS, context - len(begun)))
        # Florence-2 tells places by special tokens, such as <loc_512>.
        return Sampling(temperature=0.0, max_tokens=limit, skip_special_tokens=not self.task_prompts)

    def answer(self, text: str) -> Answer:
        """Return a text as transformers' pipeline does, without the tokens that begin, end and pad it."""
        for token in ENDS if self.task_prompts else ():
            text = text.replace(token, "")
        return {"generated_text": text.strip()}

    def features(self, tensors: Mapping[str, np.ndarray], where: str) -> bytes:
        """Return one preprocessed image as the engine takes it; raise `InputError` for one of another size."""
        pixels = tensors[PIXELS][0]
        if pixels.shape != self.sizes:
            got, wanted = ("x".join(map(str, shape)) for shape in (pixels.shape, self.sizes))
            raise InputError(f"expected an image of {wanted} after preprocessing, got {got}", where=where)
        return np.ascontiguousarray(pixels, np.float32).tobytes()
