"""Shutdown of a server with workers in each phase, by signals and failures: processes left, exit codes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from infer.serve.limits import ServeLimits
from infer.serve.options import ServeOptions
from tests.support.fake_predictors import double
from tests.support.overload_clients import GONE, until_refused
from tests.support.worker_models import DIE, alive, body_of, children, serving, started, wait_until

pytestmark = pytest.mark.chaos
INFER = "/v2/models/faulty/infer"


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def ask(url: str, *values: float) -> httpx.Response:
    return httpx.post(f"{url}{INFER}", json=body_of(*values), timeout=60)


@pytest.mark.parametrize("phase", ["opening", "warming"])
def test_sigterm_during_startup_ends_server_and_worker_with_0(phase: str) -> None:
    with started(options={phase: 60}) as running:
        wait_until(lambda: bool(children(running.pid)))
        (worker,) = children(running.pid)
        time.sleep(0.5 if phase == "warming" else 0.0)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        assert running.stderr is not None
        assert running.stderr.read() == ""
        wait_until(lambda: not alive(worker))


def test_sigterm_while_idle_leaves_nothing_behind() -> None:
    before = shared_memory()
    with serving() as (running, url):
        assert ask(url, 1).status_code == 200
        (worker,) = children(running.pid)
        assert shared_memory() == before
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
        assert not alive(worker)
        assert shared_memory() == before
        assert running.stderr is not None
        assert running.stderr.read() == ""


def test_sigterm_under_load_loses_nothing_even_if_the_worker_is_killed() -> None:
    with serving(options={"seconds": 0.05}, max_batch=4) as (running, url):

        def stop() -> None:
            (worker,) = children(running.pid)
            running.send_signal(signal.SIGTERM)
            os.kill(worker, signal.SIGKILL)

        outcomes = until_refused(url, INFER, body_of(1), clients=12, stop=stop)
        assert running.wait(20) == 0
    assert outcomes.count(200) >= 12
    assert set(outcomes) <= {200, 503, GONE}
    assert 503 in outcomes


def test_a_second_sigterm_fails_running_requests_and_kills_the_worker() -> None:
    with serving(options={"seconds": 30}, drain_seconds=60) as (running, url):
        (worker,) = children(running.pid)
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(ask(url, 1).status_code))
        thread.start()
        wait_until(lambda: 'infer_requests_running{model="faulty",version="1"} 1' in metrics(url))
        running.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        running.send_signal(signal.SIGTERM)
        thread.join()
        assert answers == [503]
        assert running.wait(20) == 0
        assert not alive(worker)


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics").text


def test_streams_end_with_their_last_token_after_sigterm(tmp_path: Path) -> None:
    with serving(opener="fake_llm", path=str(tmp_path), options={"seconds": 0.02}, text=True) as (
        running,
        url,
    ):
        body = {"model": "fake_llm", "prompt": "x", "max_tokens": 40, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            texts = answer.iter_text()
            text = next(texts)
            running.send_signal(signal.SIGTERM)
            text += "".join(texts)
        assert running.wait(20) == 0
        assert text.count('"text"') >= 2
        assert text.endswith("data: [DONE]\n\n")


def test_a_killed_server_ends_its_worker_even_a_stopped_one() -> None:
    for stop in (False, True):
        with serving() as (running, _):
            (worker,) = children(running.pid)
            if stop:
                os.kill(worker, signal.SIGSTOP)
            running.kill()
            running.wait()
            wait_until(lambda pid=worker: not alive(pid))


def test_after_failed_restarts_it_is_unready_and_exits_1() -> None:
    with serving() as (running, url):
        statuses = [ask(url, DIE, number).status_code for number in range(3)]
        assert statuses == [500, 500, 503]  # each is tried twice; at the fifth death the worker is given up
        wait_until(lambda: running.poll() is not None or stopping(url, running))
        assert running.wait(20) == 1


def stopping(url: str, running: subprocess.Popen[str]) -> bool:
    """Send SIGTERM once the server is no longer ready."""
    try:
        ready = httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return True
    if not ready:
        running.send_signal(signal.SIGTERM)
    return not ready


def test_workers_count_in_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.serve.http import listener

    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: made.append(limit))
    monkeypatch.setattr(listener, "_open_now", lambda: 20)
    for workers in (0, 3):
        listener.fit_connections(ServeLimits(), workers)
    (without, _), (with_three, _) = made
    assert with_three - without == 3 * listener.WORKER


def test_startup_times_are_printed_by_phase() -> None:
    from infer.serve.workers import model_loading

    model = double("m")
    model.phases = {"python": 0.1, "import": 1.0}
    line = model_loading.startup_summary([model], server=0.5, opening=1.25)
    assert line == "ready after 1.75 s: server 0.50, models 1.25 (m: python 0.10, import 1.00)"
    assert ServeOptions(artifacts=["m.infer"]).timings is False
