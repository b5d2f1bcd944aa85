"""Processes under test: our server, with and without its fast path and its worker, and the model alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.shared.repository import child_environment, module_command

NOOP = "noop"
TIMES = 5
START_SECONDS = 30.0


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


def make_minilm(
    folder: str, progress: Callable[[str], None], *, quant: str = "none", backend: str = "auto"
) -> str:
    import minilm
    from infer import Plan, optimize

    progress("making the MiniLM artifact")
    texts = Path(folder) / "sentences.txt"
    texts.write_text("\n".join(minilm.sentences()) + "\n")
    source = str(minilm.checkpoint_folder())
    plan = Plan(source=source, data=str(texts), quant=quant, backend=backend, allow_slower=True)
    return str(optimize(plan, Path(folder) / "minilm.infer").path)


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


def alone(predictor: Any, requests: list[dict[str, np.ndarray]]) -> list[float]:
    """Return the least of `TIMES` times of each request, in turns."""
    taken = np.full((TIMES, len(requests)), np.inf)
    for row in taken:
        for number, one in enumerate(requests):
            began = time.perf_counter()
            predictor.predict(one)
            row[number] = time.perf_counter() - began
    return [float(seconds) for seconds in taken.min(0)]


def role_model(artifact: str) -> int:
    """Run the model alone on commands from stdin, one JSON line each.

    A command asks for the expected outputs and seconds of each request, or for rows per second at a batch size.
    """
    predictor = load(artifact)
    predictor.warmup()
    from infer.serve.batching.collate import Collator

    requests, layout = samples(artifact, 64), Collator(predictor)
    print("model at http://127.0.0.1:0", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "save" in asked:
            first = predictor.outputs[0].name
            expected = np.concatenate([predictor.predict(one)[first] for one in requests])
            np.save(asked["save"], expected)
            print(json.dumps({"saved": len(expected), "seconds": alone(predictor, requests)}), flush=True)
            continue
        rows = sorted(requests, key=lambda one: next(iter(one.values())).shape[-1])
        size = min(asked["batch"], predictor.max_batch)
        groups = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < asked["seconds"]:
            for group in groups:
                predictor.predict(layout.join(group)[0])
                done += len(group)
        print(json.dumps({"rate": done / (time.perf_counter() - began)}), flush=True)
    return 0


ROLES: dict[str, Callable[[str], int]] = {
    "infer": role_infer,
    "ordinary": role_ordinary,
    "embedded": role_embedded,
    "model": role_model,
}


def _wait_for_listener(role: str, port: int) -> None:
    """Return when `port` accepts connections: uvicorn listens a moment after the role has said its address."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    raise SystemExit(f"{role} accepts no connections on port {port} after {START_SECONDS:g} s")


@contextmanager
def started(role: str, artifact: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start the role in its own process and yield its port and the process."""
    command = module_command("bench.serve.server_processes", role, artifact)
    # Threads that spin at OpenMP's barriers starve everybody else on a shared machine: the same for all roles.
    env = child_environment(OMP_WAIT_POLICY="passive")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as running:
        assert running.stdout is not None
        try:
            line = running.stdout.readline()
            if "127.0.0.1:" not in line:
                raise SystemExit(f"{role} did not start")
            port = int(line.partition("127.0.0.1:")[2].split()[0].rstrip("/"))
            if port:  # 0 where commands come on stdin
                _wait_for_listener(role, port)
            yield port, running
        finally:
            running.terminate()


def ask(running: subprocess.Popen[str], **command: Any) -> dict[str, Any]:
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(json.dumps(command) + "\n")
    running.stdin.flush()
    return json.loads(running.stdout.readline())


if __name__ == "__main__":
    sys.exit(ROLES[sys.argv[1]](sys.argv[2]))
