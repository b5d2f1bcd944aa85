"""Text ↔ token ids for an artifact that carries a tokenizer; needs `tokenizers`, never transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError, NotUsableError


class Tokenizer:
    """`tokenizer.json` of the artifact; texts longer than `max_length` tokens are cut on the right."""

    def __init__(self, path: Path, *, max_length: int, pad_id: int = 0) -> None:
        if find_spec("tokenizers") is None:
            raise NotUsableError("text needs the package tokenizers", hint="pip install 'infer[serve]'")
        import tokenizers

        self.max_length, self.pad_id = max_length, pad_id
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """One list of ids per text, special tokens added, cut to `max_length`."""
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"expected text, got {type(text).__name__}", where=f"texts[{index}]")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    "expected valid Unicode, got a lone surrogate", where=f"texts[{index}]"
                ) from error
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]

    def batch(self, texts: list[str]) -> dict[str, np.ndarray]:
        """`input_ids` and `attention_mask`, int64 [len(texts), longest], padded on the right."""
        return self.pad(self.encode(texts))

    def pad(self, rows: list[list[int]]) -> dict[str, np.ndarray]:
        longest = max((len(row) for row in rows), default=0)
        ids = np.full((len(rows), longest), self.pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)
