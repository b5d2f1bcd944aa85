"""Server process: startup line, exit codes, no lost request on SIGTERM."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from infer.errors import BusyError, UsageError
from infer.serve import server as serving
from infer.serve.http.listener import listen
from infer.serve.limits import ServeLimits
from infer.serve.served_model import ServedModel
from infer.serve.service import Service
from infer.serve.startup import startup_line
from tests.support.fake_predictors import double, embedder
from tests.support.overload_clients import GONE, until_refused

ROOT = Path(__file__).resolve().parents[2]
DATA = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


@contextlib.contextmanager
def process(
    seconds: float = 0.0, max_batch: int = 8, drain: float = 10
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server in its own process; give its address."""
    command = [
        sys.executable,
        "-m",
        "tests.support.fake_predictors",
        str(seconds),
        str(max_batch),
        str(drain),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, (line, running.poll(), running.stderr)
            yield running, found[0]
        finally:
            if running.poll() is None:
                running.kill()


def test_the_startup_line_names_models_address_and_routes() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert startup_line(Service([double(), embedder()]), listener) == (
            f"serving double, embedder at http://127.0.0.1:{port} - tensors at /v2/models/double/infer, "
            "embeddings at /v1/embeddings, docs at /docs"
        )


def test_a_port_in_use_is_busy_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BusyError, match=f"port {port} of 127.0.0.1 is taken") as caught:
            serving.run(["nowhere.infer"], port=port)
        assert caught.value.exit_code == 6


def test_a_public_address_needs_a_key_or_anonymous() -> None:
    with pytest.raises(UsageError, match="no API key"):
        serving.run(["nowhere.infer"], host="0.0.0.0")  # noqa: S104
    with listen("0.0.0.0", 0, anonymous=True), listen("0.0.0.0", 0, api_key="k"):  # noqa: S104
        pass


@pytest.mark.parametrize(
    ("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 65536), ("127.0.0.1", -1)]
)
def test_an_invalid_address_is_a_usage_error(host: str, port: int) -> None:
    with pytest.raises(UsageError), listen(host, port, anonymous=True):
        pass


def test_nothing_to_serve_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nothing to serve"):
        serving.run([])


def test_sigterm_under_load_loses_nothing_and_exits_0() -> None:
    with process(seconds=0.05, max_batch=4) as (running, url):
        doubled = httpx.post(f"{url}/v2/models/double/infer", json=DATA).json()["outputs"][0]["data"]
        assert doubled == [2, 4, 6, 8]

        def stop() -> None:
            running.send_signal(signal.SIGTERM)

        outcomes = until_refused(url, "/v2/models/double/infer", DATA, clients=12, stop=stop)
        assert running.wait(10) == 0
        assert running.stderr is not None
        assert running.stderr.read() == ""
    assert outcomes.count(200) >= 12
    assert set(outcomes) <= {200, 503, GONE}
    assert 503 in outcomes
    assert outcomes.count(503) + outcomes.count(GONE) == 12


def wait_until(met: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def admitted(client: httpx.Client) -> int:
    """Read the number of running or waiting requests from /metrics."""
    found = re.findall(
        r"^infer_requests_(?:running|waiting)\{.*\} (\S+)$", client.get("/metrics").text, re.MULTILINE
    )
    return int(sum(map(float, found)))


def test_readiness_ends_first_and_running_requests_finish() -> None:
    with (
        process(seconds=3, max_batch=1) as (running, url),
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v2/models/double/infer", json=DATA, timeout=60))
        )
        assert client.get("/ready").status_code == 200
        thread.start()
        wait_until(lambda: admitted(client) == 1)
        running.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        ready = client.get("/ready")
        assert ready.status_code == 503
        assert ready.headers["connection"] == "close"
        assert client.get("/health").status_code == 200
        refused = client.post("/v2/models/double/infer", json=DATA)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        thread.join()
        assert answers[0].status_code == 200
        assert running.wait(10) == 0


@pytest.mark.parametrize("twice", [False, True])
def test_requests_beyond_the_drain_limit_fail_and_the_exit_code_is_0(twice: bool) -> None:
    with process(seconds=4 if twice else 1.5, max_batch=1, drain=30 if twice else 0.4) as (running, url):
        answers: list[int] = []

        def post() -> None:
            answers.append(httpx.post(f"{url}/v2/models/double/infer", json=DATA, timeout=20).status_code)

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=url, timeout=20) as client:
            wait_until(lambda: admitted(client) == 2)
            began = time.monotonic()
            running.send_signal(signal.SIGTERM)
            if twice:  # two that arrive together are one
                wait_until(lambda: client.get("/ready").status_code == 503)
                running.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert answers == [503, 503]
        assert running.wait(10) == 0
        assert time.monotonic() - began < 20


def test_the_command_line_passes_on_load_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import infer.serve
    from infer.cli import main

    seen: list[infer.serve.ServeOptions] = []
    monkeypatch.setattr(infer.serve, "start", lambda options: seen.append(options) or 0)
    assert main(["serve", "m.infer", "--batch-invariant", "--max-tokens-per-step", "64"]) == 0
    assert main(["serve", "m.infer"]) == 0
    found = [(options.batch_invariant, options.max_tokens_per_step) for options in seen]
    assert found == [(True, 64), (False, None)]


def test_options_outrank_limits_and_reach_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` as the command line calls it, with a model that is no artifact."""
    from infer.serve.workers import model_loading

    seen: list[Service] = []
    given: list[dict[str, object]] = []

    def load(path: str, **options: object) -> ServedModel:
        given.append(options)
        return double(Path(path).stem)

    monkeypatch.setattr(model_loading, "load", load)
    monkeypatch.setattr(serving, "serve", lambda service, *_, **options: seen.append(service) or 0)
    bounds = ServeLimits(max_batch=2)
    own = {"max_delay_ms": 0.005, "drain": 3, "limits": bounds, "in_process": True}
    assert serving.run(["m.infer"], port=0, batch_invariant=True, **own) == 0
    assert [options["batch_invariant"] for options in given] == [True]
    (service,) = seen
    limits = service.engines["m"].limits
    assert (limits.max_delay_us, limits.drain_seconds, limits.max_batch) == (5, 3, 2)
    assert service.engines["m"].collator.max_batch == 2
    assert 'infer_model_load_seconds{model="m",phase="open"' in service.metrics.text().decode()


def test_serving_without_its_packages_is_an_error_that_names_them(run_python) -> None:
    code = """
import importlib.util as u
real = u.find_spec
u.find_spec = lambda name, *a: None if name == "uvicorn" else real(name, *a)
import infer.serve
try:
    infer.serve.run
except Exception as error:
    print(type(error).__name__, error)
"""
    assert (
        run_python(code).strip() == "NotUsableError serving needs uvicorn. pip install 'infer-engine[serve]'"
    )
