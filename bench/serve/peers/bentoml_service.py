"""BentoML services of the server comparison: `bentoml serve bentoml_service:Echo` or `:Embed`, adaptive batching on."""

from __future__ import annotations

import bentoml
import numpy as np

from bench.serve.peers.minilm_embedder import MOST, embedder


@bentoml.service(workers=1, traffic={"timeout": 120})
class Echo:
    @bentoml.api(batchable=True, max_batch_size=MOST, max_latency_ms=10_000)
    def predict(self, x: np.ndarray) -> np.ndarray:
        return x


@bentoml.service(workers=1, traffic={"timeout": 120})
class Embed:
    def __init__(self) -> None:
        self.embed = embedder()

    @bentoml.api(batchable=True, max_batch_size=MOST, max_latency_ms=10_000)
    def predict(self, texts: list[str]) -> np.ndarray:
        return self.embed(texts)
