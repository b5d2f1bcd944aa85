"""Description of an opened model: what it takes, gives and allows, wherever it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..spec import Joins, TensorSpec

GOLDEN_INPUTS = "golden/inputs.safetensors"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of an opened model.

    `padding`: input of texts → value that fills it up to one length, empty without a tokenizer; `attention_length`: see
    `spec.work_of_rows`, None where padding is computed; `path`: the artifact's folder. The rest is as in `Manifest`.
    """

    name: str
    version: str = "1"
    task: str = "tensors"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    sizes: dict[str, tuple[int, int]] = {}
    multiples: dict[str, int] = {}
    max_batch: int = 1
    padding: dict[str, int] = {}
    joins: Joins = "padded"
    states: dict[str, str] = {}
    attention_length: int | None = None
    backend: str = "model"
    meta: dict[str, Any] = {}
    files: dict[str, str] = {}
    path: str | None = None

    @property
    def generates_text(self) -> bool:
        """True for a language model; any other one is served as tensors."""
        return self.meta.get("generation") is not None

    def file(self, name: str) -> Path | None:
        """Return the path of a file of the artifact; None where it has none of this name."""
        path = None if self.path is None else Path(self.path) / name
        return path if path is not None and path.is_file() else None
