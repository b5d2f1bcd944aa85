"""Tiny models for worker processes, and helpers that inspect or kill those processes.

`python -m tests.support.worker_models OPTIONS` serves one of them; OPTIONS is JSON, see `serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from infer.artifact.model_info import ModelInfo
from infer.serve.served_model import ServedLanguageModel, ServedModel
from infer.spec import TensorSpec

if TYPE_CHECKING:
    from infer.serve.workers.messages import LanguageModelInfo
    from infer.serve.workers.remote_engine import RemoteEngine

ROOT = Path(__file__).resolve().parents[2]
DIE, RAISE, HANG = 666.0, 667.0, 668.0


def FaultyModel(  # noqa: N802 - the name of a model
    path: str, seconds: float = 0.0, opening: float = 0.0, warming: float = 0.0
) -> ServedModel:
    """Return a model y = 2·x over [batch, 4] with its process id; special values kill, raise or hang."""

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = inputs["x"]
        time.sleep(seconds)
        if (x == DIE).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (x == RAISE).any():
            raise ValueError("the secret of the model's insides")
        if (x == HANG).any():
            time.sleep(1000)
        return {"y": x * 2, "pid": np.full(len(x), os.getpid(), np.int64)}

    def warm_up() -> list[tuple[float, float]]:
        time.sleep(warming)
        return []

    time.sleep(opening)
    info = ModelInfo(
        name=Path(path).name,
        inputs=(TensorSpec("x", "float32", ("batch", 4)),),
        outputs=(TensorSpec("y", "float32", ("batch", 4)), TensorSpec("pid", "int64", ("batch",))),
        sizes={"batch": (1, 8)},
        max_batch=8,
    )
    return ServedModel(info=info, close=lambda: None, run=run, warmup=warm_up)


def multiplies(path: str) -> ServedModel:
    """Return a model y = factor·x with the factor of the manifest; "broken" there raises `ArtifactError`."""
    from infer.errors import ArtifactError

    said = json.loads((Path(path) / "manifest.json").read_text())
    if "broken" in said:
        raise ArtifactError("weights are damaged", where=path)
    made = FaultyModel(path)
    made.run = lambda inputs: {
        "y": inputs["x"] * np.float32(said["factor"]),
        "pid": np.full(len(inputs["x"]), os.getpid(), np.int64),
    }
    return made


def proven(path: str, **options: Any) -> ServedModel:
    """`FaultyModel` whose worker is known to give the right answers when it starts."""
    made = FaultyModel(path, **options)
    made.tested = True
    return made


def counts(path: str, tally: str, tested: bool) -> ServedModel:
    """`FaultyModel` that adds a byte to the file `tally` for each warm-up; `tested`: after its golden test."""
    made = proven(path) if tested else FaultyModel(path)

    def warmup() -> list[tuple[float, float]]:
        with Path(tally).open("ab") as file:
            file.write(b".")
        return [(4, 0.5)]

    made.warmup = warmup
    return made


def decays(path: str, good: int) -> ServedModel:
    """Return `FaultyModel` with a fast self-test whose outputs are wrong after `good` runs."""
    from safetensors.numpy import save_file

    from infer.serve.workers import self_test

    self_test.EVERY, self_test.MOST_SHARE = 0.0, 1.0
    made, asked = FaultyModel(path), []
    made.info = msgspec.structs.replace(made.info, path=path)
    (Path(path) / "golden").mkdir(exist_ok=True)
    save_file(x_of(1, 2), Path(path) / "golden/inputs.safetensors")
    run = made.run

    def wrong(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        asked.append(len(inputs["x"]))
        found = run(inputs)
        return found if len(asked) <= good else {**found, "y": found["y"] + 0.5}

    made.run = wrong
    return made


def fake_llm(path: str, seconds: float = 0.0) -> ServedModel:
    """Return a `FakeLLMPredictor`: "^" in a prompt ends the process, "$" does at its second letter, "~" never gets
    that; the process that compiles the regular expression "dies" ends, and the first one that compiles "dies once".
    """
    from tests.support.fake_llm import FakeEngine, FakeLLMPredictor, check_grammar

    def check(constraint: Any, tried: tuple[int, float] = (0, 0.0)) -> None:
        died, text = Path(path) / "died", constraint.get("regex")
        if text == "dies" or (text == "dies once" and not died.exists()):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        check_grammar(constraint, tried)

    class Deadly(FakeEngine):
        def _go_on(self, request: Any, made: int) -> list[Any]:
            if ord("^") in request.prompt:
                os.kill(os.getpid(), signal.SIGKILL)
            if ord("$") in request.prompt and made:
                os.kill(os.getpid(), signal.SIGKILL)
            if ord("~") in request.prompt and made:
                time.sleep(1000)
            return super()._go_on(request, made)

    made = FakeLLMPredictor(Path(path), engine=Deadly(seconds))
    made.language_model.check_grammar = check  # type: ignore[union-attr, method-assign]
    return made


def language_model(
    engine_client: RemoteEngine, info: ModelInfo, facts: LanguageModelInfo
) -> ServedLanguageModel:
    """Return the text side of `fake_llm.FakeLLMPredictor` for an engine in a worker."""
    from tests.support.fake_llm import FakeLanguageModel

    folder, check = Path(info.path or "."), engine_client.check_grammar
    return FakeLanguageModel(engine_client, folder, context=facts.context, check_grammar=check)


def refuses(path: str) -> Any:
    """Raise `ArtifactError`, like a model that can't be opened."""
    from infer.errors import ArtifactError

    raise ArtifactError("a file is missing: weights", where=path, hint="Copy it again")


def dies(path: str) -> Any:
    """End the process while the model is opened."""
    os._exit(7)


def x_of(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)}


def body_of(*values: float) -> dict[str, Any]:
    x = x_of(*values)["x"]
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}]}


def wait_until(met: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def running_pid(pid: int | None) -> int:
    """Return the id of a process that must run: signals to 0 would go to the whole group, the tests among it."""
    assert pid, "the worker is not running"
    return pid


def alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Return the child processes of all threads: a restarted worker belongs to another thread."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


@contextlib.contextmanager
def started(
    *, stderr: Any = subprocess.PIPE, files: int = 0, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a server process of `serve` that has begun to load its model; `files` limits its open files."""
    command = [sys.executable, "-m", "tests.support.worker_models", json.dumps(options)]
    if files:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as running:
        try:
            assert running.stdout.readline() == "loading\n"
            yield running
        finally:
            if running.poll() is None:
                running.kill()


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server process; yield it with its address once it answers."""
    with started(**options) as running:
        line = running.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, (line, running.poll(), running.stderr and running.stderr.read())
        yield running, found[0]


def serve(
    opener: str = "FaultyModel",
    path: str = "faulty",
    options: Any = None,
    text: bool = False,
    run: Any = None,
    log: bool = False,
    **limits: Any,
) -> int:
    """`infer.serve.run` with `tests.support.worker_models:OPENER` for an artifact; prints when it begins to load."""
    from infer.serve import server
    from infer.serve.limits import ServeLimits
    from infer.serve.workers import model_loading as opening
    from infer.serve.workers.messages import ModelSource

    def source(**given: Any) -> ModelSource:
        if not said:
            print("loading", flush=True)
        said.append(True)
        return ModelSource(**{**given, "opener": f"tests.support.worker_models:{opener}", "options": own})

    said: list[bool] = []
    own, opening.ModelSource = options or {}, source  # type: ignore[misc,assignment]
    if text:
        opening.is_language_model = lambda folder: True
        opening.served_language_model = partial(opening.served_language_model, text_side=language_model)
    more = {"log_requests": log, **(run or {})}
    return server.run([path], port=0, limits=ServeLimits(**limits), **more)


if __name__ == "__main__":
    sys.exit(serve(**json.loads(sys.argv[1])))
