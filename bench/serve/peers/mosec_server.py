"""mosec server of the comparison: `python mosec_server.py --port PORT …`, batches after at most 1 ms."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
from mosec import Server, Worker

from bench.serve.peers.minilm_embedder import MOST, embedder


class Quick(Worker):
    """JSON by msgspec, which mosec brings along; its own way is an indented `json.dumps`."""

    def deserialize(self, data: bytes) -> Any:
        return msgspec.json.decode(data)

    def serialize(self, data: Any) -> bytes:
        return msgspec.json.encode(data)


class Echo(Quick):
    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = np.asarray([one["x"] for one in data], np.float32)
        return [{"y": row} for row in rows.tolist()]


class Raw(Worker):
    """Worker with bytes of float32 in and out."""

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.float32)

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        return list(np.stack(data))


class Embed(Quick):
    def __init__(self) -> None:
        super().__init__()
        self.embed = embedder()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"embedding": row} for row in self.embed([one["text"] for one in data]).tolist()]


if __name__ == "__main__":
    kind = {"noop": Echo, "noop-binary": Raw}.get(os.environ["PEERS_KIND"], Embed)
    server = Server()
    server.append_worker(kind, num=1, max_batch_size=MOST, max_wait_time=1)
    server.run()
