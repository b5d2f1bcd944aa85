"""A model in worker processes, with the surface of a Predictor that the server needs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import NotReadyError, UsageError
from ...text import Tokenizer
from .messages import Card, Source
from .replica import LostError, Replica, WatchLimits
from .restarts import RestartLimits


class Remote:
    """`executors` run its batches; what a text model needs of its tokenizer is done here. `phases`: seconds."""

    def __init__(self, executors: Sequence[Replica], card: Card) -> None:
        self.executors, self.card = list(executors), card
        self.name, self.version, self.task = card.name, card.version, card.task
        self.inputs, self.outputs, self.sizes = card.inputs, card.outputs, card.sizes
        self.max_batch, self.padding, self.manifest = card.max_batch, card.padding, card.manifest
        self.path = None if card.path is None else Path(card.path)
        self.phases = dict(executors[0].phases)
        self._tokenizer: Tokenizer | None = None

    @property
    def report(self) -> dict[str, Any]:
        """As `Predictor.report`."""
        return {} if self.path is None else json.loads((self.path / "report.json").read_text())

    @property
    def tokenizer(self) -> Tokenizer:
        """As `Predictor.tokenizer`."""
        if self._tokenizer is None:
            if self.path is None or not (self.path / "tokenizer.json").exists():
                raise UsageError(f"{self.name} takes tensors, not text")
            meta = self.manifest.meta or {}
            longest = min(int(meta.get("max_length", 10**9)), self.sizes.get("seq", (1, 512))[1])
            self._tokenizer = Tokenizer(
                self.path / "tokenizer.json", max_length=longest, pad_id=self.padding["input_ids"]
            )
        return self._tokenizer

    def tokenize(self, texts: list[str]) -> dict[str, np.ndarray]:
        """As `Predictor.tokenize`."""
        wanted = {spec.name for spec in self.inputs}
        return {name: value for name, value in self.tokenizer.batch(texts).items() if name in wanted}

    def warmup(self) -> None:
        """The workers did that before they were ready."""

    def close(self) -> None:
        for executor in self.executors:
            executor.close()


class Starting:
    """Workers of one model that open it while the caller does something else; `remote` waits for them."""

    def __init__(
        self,
        source: Source,
        replicas: int = 1,
        *,
        watch: WatchLimits | None = None,
        restart: RestartLimits | None = None,
    ) -> None:
        self.began = time.perf_counter()
        self._replicas = [Replica(source, watch=watch, restart=restart) for _ in range(replicas)]
        for replica in self._replicas:
            replica.start()

    def remote(self) -> Remote:
        """Raises what opening the model raised; nothing is left running then."""
        try:
            cards = [replica.wait() for replica in self._replicas]
        except LostError as error:
            self.close()
            raise NotReadyError(f"the model's process ended while it started: {error}") from error
        except BaseException:
            self.close()
            raise
        return Remote(self._replicas, cards[0])

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()
