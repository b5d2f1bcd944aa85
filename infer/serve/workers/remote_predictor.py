"""A tensor model in worker processes, with the parts of the Predictor interface that serving uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...artifact.manifest import read_report
from ...errors import UsageError
from ...llm.text.tokenizer import Tokenizer
from .messages import ModelInfo
from .replica import Replica
from .supervisor import SupervisedWorker


class RemoteModel:
    """Attributes that a worker reported of its model; `phases` and `speeds`: see `WorkerReady`."""

    def __init__(self, workers: Sequence[SupervisedWorker], card: ModelInfo) -> None:
        self.card, self.phases = card, dict(workers[0].phases)
        self.speeds = list(workers[0].speeds)
        self.name, self.version, self.task = card.name, card.version, card.task
        self.inputs, self.outputs, self.sizes = card.inputs, card.outputs, card.sizes
        self.max_batch, self.padding, self.manifest = card.max_batch, card.padding, card.manifest
        self.path = None if card.path is None else Path(card.path)

    @property
    def report(self) -> dict[str, Any]:
        """The artifact's report, like `Predictor.report`."""
        return {} if self.path is None else read_report(self.path)

    def warmup(self) -> None:
        """Do nothing: workers warm up before they report readiness."""


class RemotePredictor(RemoteModel):
    """A model of tensors: `executors` run its batches; texts are tokenized in this process."""

    def __init__(self, executors: Sequence[Replica], card: ModelInfo) -> None:
        super().__init__(executors, card)
        self.executors = list(executors)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The artifact's tokenizer, like `Predictor.tokenizer`."""
        if self._tokenizer is None:
            if self.path is None or not (self.path / "tokenizer.json").exists():
                raise UsageError(f"{self.name} takes tensors, not text")
            self._tokenizer = Tokenizer(
                self.path / "tokenizer.json", max_length=self.longest, pad_id=self.padding["input_ids"]
            )
        return self._tokenizer

    @property
    def longest(self) -> int:
        """Length in tokens to which texts are truncated."""
        meta = self.manifest.meta or {}
        return min(int(meta.get("max_length", 10**9)), self.sizes.get("seq", (1, 512))[1])

    def tokenize(self, texts: list[str]) -> dict[str, np.ndarray]:
        """Return the model inputs for `texts`, like `Predictor.tokenize`."""
        return self.pad(self.tokenizer.encode(texts))

    def pad(self, rows: list[list[int]]) -> dict[str, np.ndarray]:
        """Return the model inputs for texts of these token ids, padded to one length."""
        wanted = {spec.name for spec in self.inputs}
        return {name: value for name, value in self.tokenizer.pad(rows).items() if name in wanted}

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
