"""The service on a real Ray cluster of two nodes: same routes, same refusals, and a node may die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from infer import Plan, Predictor, optimize
from infer.cli import main
from infer.errors import NotUsableError, UsageError
from infer.serve import ray_run
from infer.serve.limits import ServeLimits
from infer.serve.options import ServeOptions
from infer.serve.ray_app import RayReplica, check, deployment_options, from_args, replica_args
from tests.support.llm_artifacts import tiny

ROOT = Path(__file__).resolve().parents[2]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make ray")
RECIPE = """
import torch
from torch import nn

INPUTS = {"x": "float32[batch,1024]"}
OUTPUTS = ("y",)


def build():
    torch.manual_seed(0)
    return Model().eval()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x):
        for _ in range(40):
            x = torch.tanh(self.layer(x))
        return x


def example_inputs():
    return {"x": torch.randn(2, 1024, generator=torch.Generator().manual_seed(1))}
"""
SERVE = """
import sys, json
from infer.options import from_values
from infer.serve.options import ServeOptions
from infer.serve.ray_run import run
options = from_values(ServeOptions, json.loads(sys.argv[1]))
sys.exit(run(options, head_only=True, say=lambda line: print(line, flush=True)))
"""
INFER = "/v2/models/slow/infer"
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def test_ray_replica_accepts_more_than_its_queue_to_reject_itself() -> None:
    bounds = ServeLimits(max_queue_requests=100)
    options = deployment_options(ServeOptions(artifacts=("a",), limits=bounds, num_cpus=2, num_gpus=0.5))
    assert options["max_ongoing_requests"] > 100
    assert options["max_queued_requests"] > 0
    assert options["backpressure_config"]["retry_after_s"] > 0
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0.5}
    assert options["num_replicas"] == 1


def test_autoscaling_follows_ongoing_requests() -> None:
    asked = ServeOptions(artifacts=("a",), replicas=2, max_replicas=8, target_requests=5)
    options = deployment_options(asked)
    assert "num_replicas" not in options
    assert options["autoscaling_config"] == {
        "min_replicas": 2,
        "max_replicas": 8,
        "target_ongoing_requests": 5,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"artifacts": []},
        {"replicas": 0},
        {"replicas": 3, "max_replicas": 2},
        {"num_cpus": -1},
        {"target_requests": 0},
    ],
)
def test_undeployable_options_are_usage_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        check(from_args({"artifacts": ["a"], **wrong}))


def test_ray_config_file_omits_only_the_api_key(tmp_path: Path) -> None:
    asked = ServeOptions(
        artifacts=("/models/a.infer",),
        replicas=3,
        api_key=("s3cret",),
        host="0.0.0.0",
        port=9000,  # noqa: S104
    )
    ray_run.write_config(tmp_path / "serve.yaml", asked)
    text = (tmp_path / "serve.yaml").read_text()
    assert "s3cret" not in text
    (application,) = json.loads(text)["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
    assert application["args"]["replicas"] == 3


def test_command_line_writes_the_ray_config_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    arguments = ["serve", "a.infer", "--ray", "--replicas", "2", "--max-replicas", "4", "--num-cpus", "2"]
    assert main([*arguments, "--ray-config", str(file)]) == 0
    args = json.loads(file.read_text())["applications"][0]["args"]
    assert (args["replicas"], args["max_replicas"], args["num_cpus"]) == (2, 4, 2.0)
    assert Path(args["artifacts"][0]).is_absolute()


def test_limits_reach_replicas_and_unsupported_options_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    command = ["serve", "a.infer", "--ray", "--ray-config", str(file)]
    assert main([*command, "--limit", "max_queue_requests=7", "--nonfinite", "error", "--drain", "5"]) == 0
    bounds = from_args(json.loads(file.read_text())["applications"][0]["args"]).bounds
    assert (bounds.max_queue_requests, bounds.nonfinite_error, bounds.drain_seconds) == (7, True, 5.0)
    file.unlink()
    assert main([*command, "--lora", "a=b", "--memory", "1GiB"]) == 2
    assert "--ray has no --memory, --lora" in capsys.readouterr().err
    assert not file.exists()


def test_public_address_needs_a_key_and_artifacts_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no API key"):
        ray_run.check(ServeOptions(artifacts=("a",), host="0.0.0.0"))  # noqa: S104
    with pytest.raises(UsageError, match="no artifact"):
        ray_run.check(ServeOptions(artifacts=(str(tmp_path / "nope"),)))


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_missing_ray_gives_an_install_hint(tmp_path: Path) -> None:
    with pytest.raises(NotUsableError, match="needs ray") as caught:
        ray_run.check(ServeOptions(artifacts=(str(tmp_path),)))
    assert "infer-engine[ray]" in caught.value.hint


def test_ray_replica_survives_its_worker(
    artifacts: list[Path], expected: tuple[dict[str, Any], np.ndarray]
) -> None:
    replica = RayReplica(replica_args(ServeOptions(artifacts=(str(artifacts[0]),), threads=1)))
    (executor,) = (runner.executor for runner in replica.service.engines["slow"].runners)

    async def die_once() -> None:
        app = replica.__serve_build_asgi_app__()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with replica._lifespan(app), client:
            for _ in range(2):
                answer = await client.post(INFER, json=expected[0], timeout=60)
                data = answer.json()["outputs"][0]["data"]
                np.testing.assert_allclose(data, expected[1].ravel(), rtol=1e-4, atol=1e-6)
                await replica.check_health()
                if executor.pid == first:
                    os.kill(first, signal.SIGKILL)

    first = executor.pid
    assert first not in (None, os.getpid())
    asyncio.run(die_once())
    assert not psutil.pid_exists(first)
    assert executor.pid is None, "it ends with its replica"


class Nodes:
    """Two nodes of one CPU each on this machine, and the service deployed on both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.environment = folder, {**os.environ, **ENVIRONMENT}
        self.gcs, self.port = free_port(), free_port()
        self.managers = [free_port(), free_port()]
        self.process: subprocess.Popen[str] | None = None
        self.temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # noqa: S108 - sockets need a short path

    def start(self, *arguments: str) -> None:
        common = ["--disable-usage-stats", "--num-cpus", "1", "--object-store-memory", "80000000"]
        for name in ("dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent", "metrics-export"):
            common += [f"--{name}-port", str(free_port())]  # else a node waits for each, and not for long
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *common]
        for _ in range(3):  # a busy machine may miss Ray's own 30 seconds for it
            told = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300)
            if told.returncode == 0:
                return
        pytest.fail(told.stderr[-2000:])

    def raylet(self, index: int) -> psutil.Process:
        mark = f"--node_manager_port={self.managers[index]}"
        return next(p for p in psutil.process_iter() if mark in _words(p))

    def kill(self, index: int) -> None:
        """Kill all processes of the node at once, like a power loss."""
        raylet = self.raylet(index)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def serve(self, asked: dict[str, Any]) -> None:
        asked = {**asked, "ray_address": f"127.0.0.1:{self.gcs}", "port": self.port}
        told = self.folder / "serve.log"
        with told.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, json.dumps(asked)],
                **{"cwd": ROOT, "env": self.environment, "text": True},
                **{"stdout": subprocess.PIPE, "stderr": log},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving slow, tiny on 2 nodes"), told.read_text()[-3000:]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        for index in (1, 0):
            with contextlib.suppress(StopIteration):
                self.kill(index)
        for process in psutil.process_iter():
            if self.temporary in " ".join(_words(process)):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "recipe.py").write_text(RECIPE)
    space: dict[str, Any] = {}
    exec(RECIPE, space)  # noqa: S102
    torch.save(space["build"]().state_dict(), folder / "slow.pt")
    plan = Plan(
        source=str(folder / "slow.pt"),
        model=f"{folder}/recipe.py:build",
        backend="eager",
        max_batch=2,
        batches=(1,),
    )
    return [optimize(plan, folder / "slow.infer").path, tiny(folder, speaks=True)]


@pytest.fixture(scope="module")
def nodes(artifacts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        home = ["--temp-dir", made.temporary, "--include-dashboard=false"]
        ports = [["--node-manager-port", str(port)] for port in made.managers]
        made.start("--head", "--port", str(made.gcs), *home, *ports[0])
        made.start("--address", f"127.0.0.1:{made.gcs}", *ports[1])
        made.serve(
            {
                "artifacts": [str(path) for path in artifacts],
                **{"replicas": 2, "threads": 1, "kv_memory": "16MiB"},
                "limits": {"max_queue_requests": 4},
            }
        )
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def expected(artifacts: list[Path]) -> tuple[dict[str, Any], np.ndarray]:
    """Make a request for the slow model, and the Predictor's answer to it."""
    x = np.linspace(-1, 1, 1024, dtype=np.float32)[None]
    with Predictor.load(artifacts[0]) as predictor:
        y = predictor.predict({"x": x})["y"]
    data = {"name": "x", "datatype": "FP32", "shape": [1, 1024], "data": x.ravel().tolist()}
    return {"inputs": [data]}, y


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def total(nodes: Nodes, name: str, **labels: str) -> float:
    """Return the largest value of a counter among replicas; each scrape reaches one of them."""
    found = 0.0
    for _ in range(12):
        for line in httpx.get(f"{nodes.url}/metrics", timeout=20).text.splitlines():
            match = re.fullmatch(rf"infer_{name}{{(.*)}} (\S+)", line)
            if match and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[1])).items():
                found = max(found, float(match[2]))
    return found


@needs_ray
def test_every_route_responds_as_without_ray(
    nodes: Nodes, expected: tuple[dict[str, Any], np.ndarray]
) -> None:
    with httpx.Client(base_url=nodes.url, timeout=30) as client:
        for path in (
            "/",
            "/health",
            "/ready",
            "/metrics",
            "/openapi.json",
            "/docs",
            "/v2/models/slow",
            "/v1/models",
        ):
            assert client.get(path).status_code == 200, path
        assert "<html" in client.get("/", headers={"Accept": "text/html"}).text
        answer = client.post(INFER, json=expected[0], headers={"X-Request-Id": "mine"})
        np.testing.assert_allclose(
            answer.json()["outputs"][0]["data"], expected[1].ravel(), rtol=1e-4, atol=1e-6
        )
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert client.post(INFER, json={"inputs": []}).status_code == 400
        assert client.get("/v2/models/nope").status_code == 404
        assert client.delete("/health").headers["allow"] == "GET, HEAD"


@needs_ray
def test_ray_streams_incrementally_and_cancels_on_disconnect(nodes: Nodes) -> None:
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{nodes.url}/v1/completions", json=asked, timeout=30) as answer:
        lines = [(time.monotonic(), line) for line in answer.iter_lines() if line]
    assert lines[-1][1] == "data: [DONE]"
    assert lines[-1][0] - lines[0][0] > 0.01
    for _ in range(6):
        with httpx.stream("POST", f"{nodes.url}/v1/completions", json=asked, timeout=30) as answer:
            next(answer.iter_lines())
    until(lambda: total(nodes, "cancelled_total", model="tiny", stage="running") > 0, 20)
    until(lambda: total(nodes, "requests_total", model="tiny", code="499") > 0, 20)
    until(lambda: total(nodes, "requests_running", model="tiny") == 0, 20)


@needs_ray
def test_ray_rejections_carry_the_replica_s_retry_after(
    nodes: Nodes, expected: tuple[dict[str, Any], np.ndarray]
) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{nodes.url}{INFER}", json=expected[0], timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) > 0
            assert re.search("the queue holds|work that arrives now would", answer.json()["error"])


@needs_ray
def test_node_death_loses_only_its_running_requests(
    nodes: Nodes, expected: tuple[dict[str, Any], np.ndarray]
) -> None:
    clients, over, wrong = 6, threading.Event(), list[Any]()
    outcomes: list[list[tuple[float, Any]]] = [[] for _ in range(clients)]

    def load(mine: list[tuple[float, Any]]) -> None:
        while not over.is_set():
            try:
                answer = httpx.post(f"{nodes.url}{INFER}", json=expected[0], timeout=60)
            except httpx.HTTPError as error:
                mine.append((time.monotonic(), repr(error)))
                continue
            mine.append((time.monotonic(), answer.status_code))
            if answer.status_code == 200:
                given = answer.json()["outputs"][0]["data"]
                if not np.allclose(given, expected[1].ravel(), rtol=1e-4, atol=1e-6):
                    wrong.append(given[:4])
            elif answer.status_code == 503:
                time.sleep(0.05)

    threads = [threading.Thread(target=load, args=(mine,)) for mine in outcomes]
    for thread in threads:
        thread.start()
    until(lambda: all(len(mine) > 5 for mine in outcomes))
    nodes.kill(1)
    killed = time.monotonic()
    until(
        lambda: all(sum(when > killed + 5 and said == 200 for when, said in mine) > 5 for mine in outcomes),
        120,
    )
    over.set()
    for thread in threads:
        thread.join()
    lost = [said for mine in outcomes for when, said in mine if said not in (200, 503)]
    assert wrong == []
    assert len(lost) <= clients, lost  # each client had one request under way


@needs_ray
def test_sigterm_removes_the_ray_service_and_exits_0(nodes: Nodes) -> None:
    assert nodes.process is not None
    nodes.process.send_signal(signal.SIGTERM)
    assert nodes.process.wait(90) == 0
