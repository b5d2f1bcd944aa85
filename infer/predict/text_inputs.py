"""Text inputs of models that carry a tokenizer: token ids in rows, and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..llm.text.tokenizer import TextOrPair, Tokenizer
from .tensors import TensorInputs


class TextInputs(TensorInputs):
    """Predictor's methods for text: tokenize and embed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.padding: dict[str, int] = {}
        self._tokenizer: Tokenizer | None = None
        if (self.path / "tokenizer.json").exists():
            pad_id = int(self.manifest.meta.get("pad_id") or 0)
            self.padding = {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the artifact; raises `UsageError` when it has none."""
        if self._tokenizer is None:
            path = self.path / "tokenizer.json"
            if not path.exists():
                raise UsageError(f"{self.name} takes tensors, not text", hint=f"It expects {self._names()}")
            longest = min(
                int(self.manifest.meta.get("max_length", 10**9)), self.sizes.get("seq", (1, 512))[1]
            )
            self._tokenizer = Tokenizer(path, max_length=longest, pad_id=self.padding["input_ids"])
        return self._tokenizer

    def tokenize(self, texts: Sequence[TextOrPair]) -> dict[str, np.ndarray]:
        """Convert texts to inputs: `input_ids`, `attention_mask` and `token_type_ids`, as far as the model takes them.

        Each is int64 [len(texts), longest], padded. A row may be a pair of texts, such as question and passage. Raises
        `UsageError` for an artifact without a tokenizer.
        """
        wanted = {spec.name for spec in self.inputs}
        return {name: value for name, value in self.tokenizer.batch(texts).items() if name in wanted}

    def embed(self, texts: list[str]) -> np.ndarray:
        """Embed texts: float32 [len(texts), dim]. Texts of similar length run together, `max_batch` at a time.

        Raises `UsageError` for a model that is no embedding model.
        """
        if self.task != "embedding":
            raise UsageError(f"{self.name} is a {self.task} model, not an embedding model")
        rows = self.tokenizer.encode(texts)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        width = self.outputs[0].shape[-1]
        result = np.zeros((len(rows), int(width)), dtype=np.float32)
        for start in range(0, len(order), self.max_batch):
            chosen = order[start : start + self.max_batch]
            result[chosen] = self.predict(self.tokenizer.pad([rows[i] for i in chosen]))[self.outputs[0].name]
        return result
