"""LitServe server of the comparison: `python litserve_server.py PORT`, its fast queue and batches on."""

import os
import sys
from typing import Any

import litserve
import numpy as np

from bench.serve.peers.minilm_embedder import MOST, embedder


class Echo(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, Any]) -> Any:
        return np.asarray(request["x"], np.float32)

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, x: Any) -> np.ndarray:
        return x

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        return {"y": output.tolist()}


class Embed(Echo):
    def setup(self, device: str) -> None:
        self.embed = embedder()

    def decode_request(self, request: dict[str, Any]) -> Any:
        return request["text"]

    def batch(self, inputs: list[Any]) -> Any:
        return inputs

    def predict(self, x: Any) -> np.ndarray:
        return self.embed(x)


if __name__ == "__main__":
    kind = Echo if os.environ["PEERS_KIND"] == "noop" else Embed
    server = litserve.LitServer(
        kind(max_batch_size=MOST, batch_timeout=0.001),
        accelerator="cpu",
        workers_per_device=1,
        timeout=120,
        fast_queue=True,
    )
    server.run(
        "127.0.0.1", int(sys.argv[1]), num_api_servers=1, generate_client_file=False, log_level="warning"
    )
