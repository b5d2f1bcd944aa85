"""A model in worker processes, with the surface of a Predictor that the server needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...artifact.manifest import read_report
from ...errors import ArtifactError, UsageError
from ...llm.text.tokenizer import Tokenizer
from .messages import Card, Source
from .replica import Replica
from .restart_policy import RestartLimits
from .supervisor import LostError, Supervised, WatchLimits


class Carded:
    """What its card says of a model. `phases` and `speeds`: see `messages.Ready`."""

    def __init__(self, workers: Sequence[Supervised], card: Card) -> None:
        self.card, self.phases = card, dict(workers[0].phases)
        self.speeds = list(workers[0].speeds)
        self.name, self.version, self.task = card.name, card.version, card.task
        self.inputs, self.outputs, self.sizes = card.inputs, card.outputs, card.sizes
        self.max_batch, self.padding, self.manifest = card.max_batch, card.padding, card.manifest
        self.path = None if card.path is None else Path(card.path)

    @property
    def report(self) -> dict[str, Any]:
        """As `Predictor.report`."""
        return {} if self.path is None else read_report(self.path)

    def warmup(self) -> None:
        """The workers did that before they were ready."""


class Remote(Carded):
    """A model of tensors: `executors` run its batches; texts are tokenized here."""

    def __init__(self, executors: Sequence[Replica], card: Card) -> None:
        super().__init__(executors, card)
        self.executors = list(executors)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """As `Predictor.tokenizer`."""
        if self._tokenizer is None:
            if self.path is None or not (self.path / "tokenizer.json").exists():
                raise UsageError(f"{self.name} takes tensors, not text")
            self._tokenizer = Tokenizer(
                self.path / "tokenizer.json", max_length=self.longest, pad_id=self.padding["input_ids"]
            )
        return self._tokenizer

    @property
    def longest(self) -> int:
        """Tokens to which a text is cut."""
        meta = self.manifest.meta or {}
        return min(int(meta.get("max_length", 10**9)), self.sizes.get("seq", (1, 512))[1])

    def tokenize(self, texts: list[str]) -> dict[str, np.ndarray]:
        """As `Predictor.tokenize`."""
        return self.pad(self.tokenizer.encode(texts))

    def pad(self, rows: list[list[int]]) -> dict[str, np.ndarray]:
        """The inputs for texts of these token ids."""
        wanted = {spec.name for spec in self.inputs}
        return {name: value for name, value in self.tokenizer.pad(rows).items() if name in wanted}

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
        text: bool = False,
        watch: WatchLimits | None = None,
        restart: RestartLimits | None = None,
    ) -> None:
        self._text, self._path = text, source.path
        self._workers: list[Supervised] = []
        for _ in range(replicas):
            plain = Supervised(source, watch=watch, restart=restart) if text else None
            self._workers.append(plain or Replica(source, watch=watch, restart=restart))
        for worker in self._workers:
            worker.start()

    def remote(self) -> Any:
        """`Remote`, or `RemoteText`. Raises what opening the model raised; nothing is left running then."""
        try:
            cards = [worker.wait() for worker in self._workers]
        except LostError as error:
            self.close()
            raise ArtifactError(
                f"the model's process ended while it opened the artifact: {error}",
                where=self._path,
                hint="'infer verify' opens it alone; memory may have run out, or the artifact is damaged",
            ) from error
        except BaseException:
            self.close()
            raise
        if self._text:
            from .remote_llm import RemoteText

            return RemoteText(self._workers[0], cards[0])
        return Remote([worker for worker in self._workers if isinstance(worker, Replica)], cards[0])

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
