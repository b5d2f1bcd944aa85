"""Processes under test: our server, with and without its fast path and its worker, and the model alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.serve.serving import Server, serving
from bench.shared.child_process import ChildProcess
from bench.shared.repository import module_command

if TYPE_CHECKING:
    from infer.serve.served_model import ServedModel

NOOP = "noop"
TIMES = 5
REQUESTS = 64


def noop(path: str = NOOP) -> ServedModel:
    """Return a model without computation, so that only the server is measured."""
    from infer.artifact.model_info import ModelInfo
    from infer.serve.served_model import ServedModel
    from infer.spec import TensorSpec

    (x, y), sizes = (TensorSpec(name, "float32", ("batch", 16)) for name in "xy"), {"batch": (1, 64)}
    info = ModelInfo(name=NOOP, inputs=(x,), outputs=(y,), sizes=sizes, max_batch=64)
    return ServedModel(info=info, close=lambda: None, run=lambda inputs: {"y": inputs["x"]})


def load(artifact: str) -> ServedModel:
    from infer.serve import served_model

    return noop() if artifact == NOOP else served_model.load(artifact)


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
            return server.serve(Service([noop()]), listener)
        with closing(
            StartingModel(ModelSource(path=NOOP, opener="bench.serve.server_processes:noop"))
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

        self._model = load(artifact)
        self._model.warmup()
        self._requests, self._layout = samples(artifact, REQUESTS), Collator(self._model.info)

    def expected(self) -> np.ndarray:
        """Return the first output of all requests, a row each."""
        first = self._model.info.outputs[0].name
        return np.concatenate([self._model.run(one)[first] for one in self._requests])

    def seconds(self) -> list[float]:
        """Return the least of `TIMES` times of each request, in turns."""
        taken = np.full((TIMES, len(self._requests)), np.inf)
        for row in taken:
            for number, one in enumerate(self._requests):
                began = time.perf_counter()
                self._model.run(one)
                row[number] = time.perf_counter() - began
        return [float(seconds) for seconds in taken.min(0)]

    def rate(self, batch: int, seconds: float) -> float:
        """Return rows a second in batches of rows of like length."""
        rows = sorted(self._requests, key=lambda one: next(iter(one.values())).shape[-1])
        size = min(batch, self._model.info.max_batch)
        groups = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for group in groups:
                self._model.run(self._layout.collate(group)[0])
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
