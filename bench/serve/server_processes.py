"""Processes under test: our server, with and without its fast path and its worker, and the model alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.serve.serving import Server, serving
from bench.shared.child_process import ChildProcess
from bench.shared.repository import module_command

NOOP = "noop"
TIMES = 5
REQUESTS = 64


class Noop:
    """Model without computation, so that only the server is measured."""

    name, version, task, max_batch = NOOP, "1", "tensors", 64
    sizes, padding, report = {"batch": (1, 64)}, dict[str, int](), dict[str, Any]()
    manifest = SimpleNamespace(backend="none", meta={})

    def __init__(self, path: str = NOOP) -> None:
        from infer.spec import TensorSpec

        self.inputs = (TensorSpec("x", "float32", ("batch", 16)),)
        self.outputs = (TensorSpec("y", "float32", ("batch", 16)),)

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": inputs["x"]}

    def warmup(self) -> None:
        pass

    def close(self) -> None:
        pass


def load(artifact: str) -> Any:
    if artifact == NOOP:
        return Noop()
    from infer import Predictor

    return Predictor.load(artifact)


def samples(artifact: str, count: int) -> list[dict[str, np.ndarray]]:
    """Return `count` one-row requests: sentences of many lengths with a tokenizer, else golden inputs."""
    if artifact == NOOP:
        rows = np.random.default_rng(0).standard_normal((count, 1, 16)).astype(np.float32)
        return [{"x": row} for row in rows]
    if (Path(artifact) / "tokenizer.json").exists():
        import minilm
        from infer import Predictor

        predictor = Predictor.load(artifact)
        return [predictor.tokenize([text]) for text in minilm.sentences()[:count]]
    from safetensors.numpy import load_file

    golden = load_file(str(Path(artifact) / "golden/inputs.safetensors"))
    there = len(next(iter(golden.values())))
    return [{name: array[i % there][None].copy() for name, array in golden.items()} for i in range(count)]


def role_infer(artifact: str, *, in_process: bool = False) -> int:
    """Serve with our server, the model in a worker process."""
    from infer import serve
    from infer.serve import server
    from infer.serve.http import listener as port
    from infer.serve.service import Service
    from infer.serve.workers.messages import ModelSource
    from infer.serve.workers.model_loading import StartingModel

    if artifact != NOOP:
        return serve.run([artifact], port=0, in_process=in_process, log_requests=False)
    with port.listen("127.0.0.1", 0) as listener:
        if in_process:
            return server.serve(Service([Noop()]), listener)
        with closing(
            StartingModel(ModelSource(path=NOOP, opener="bench.serve.server_processes:Noop"))
        ) as starting:
            return server.serve(Service([starting.wait_ready()]), listener)


def role_ordinary(artifact: str) -> int:
    """Serve with our server without its fast path, the model in a worker process."""
    from infer.serve import server

    server.Coalescer = lambda app: None  # type: ignore[assignment,misc]
    return role_infer(artifact)


def role_embedded(artifact: str) -> int:
    """Serve with our server, the model in the server's own process."""
    return role_infer(artifact, in_process=True)


class ModelAlone:
    """The model without a server, for `ChildProcess`."""

    def __init__(self, artifact: str) -> None:
        from infer.serve.batching.collate import Collator

        self._predictor = load(artifact)
        self._predictor.warmup()
        self._requests, self._layout = samples(artifact, REQUESTS), Collator(self._predictor)

    def expected(self) -> np.ndarray:
        """Return the first output of all requests, a row each."""
        first = self._predictor.outputs[0].name
        return np.concatenate([self._predictor.predict(one)[first] for one in self._requests])

    def seconds(self) -> list[float]:
        """Return the least of `TIMES` times of each request, in turns."""
        taken = np.full((TIMES, len(self._requests)), np.inf)
        for row in taken:
            for number, one in enumerate(self._requests):
                began = time.perf_counter()
                self._predictor.predict(one)
                row[number] = time.perf_counter() - began
        return [float(seconds) for seconds in taken.min(0)]

    def rate(self, batch: int, seconds: float) -> float:
        """Return rows a second in batches of rows of like length."""
        rows = sorted(self._requests, key=lambda one: next(iter(one.values())).shape[-1])
        size = min(batch, self._predictor.max_batch)
        groups = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for group in groups:
                self._predictor.predict(self._layout.collate(group)[0])
                done += len(group)
        return done / (time.perf_counter() - began)


def model_alone(artifact: str) -> closing[ChildProcess]:
    """Start `ModelAlone` in a process of its own, whose threads sleep when they wait, as the servers' do."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    return closing(ChildProcess(ModelAlone, artifact))


ROLES: dict[str, Callable[[str], int]] = {
    "infer": role_infer,
    "ordinary": role_ordinary,
    "embedded": role_embedded,
}


def started(role: str, artifact: str) -> AbstractContextManager[Server]:
    """Start the role in its own process; its port and the process."""
    return serving(module_command("bench.serve.server_processes", role, artifact))


if __name__ == "__main__":
    sys.exit(ROLES[sys.argv[1]](sys.argv[2]))
