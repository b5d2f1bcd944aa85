"""Text requests that end early: disconnects, deadlines, full queues, dead engines, server shutdown."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.serve.generation import event_stream
from infer.serve.limits import ServeLimits
from infer.serve.llm.prompt_queue import AGING, WaitErrorModel
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import live

JSON = dict[str, Any]


def wait_until(met: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


@contextmanager
def slow_speaker(folder: Path) -> Iterator[tuple[httpx.Client, Any, FakeEngine]]:
    """Open a client of an engine whose gate is closed, with 15 s predicted for a prompt of one token."""
    engine = FakeEngine()
    engine.gate.clear()
    with live(FakeLLMPredictor(folder, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        model = server.service.generators["fake_llm"]
        model.admission.prefill_rate.observe(1, 15.0)
        yield raw, model, engine


def test_disconnected_client_is_cancelled_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.005)
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as own, httpx.Client(base_url=own.url) as raw:
        for stream in (True, False):
            body = {"model": "fake_llm", "prompt": "x", "max_tokens": 62, "stream": stream, "n": 2}
            engine.cancelled.clear()
            if stream:
                with raw.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_text())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    raw.post("/v1/completions", json=body, timeout=0.05)
            wait_until(lambda: bool(engine.cancelled), 2)
            wait_until(lambda: own.service.generators["fake_llm"].idle)
        text = raw.get("/metrics").text
        assert 'infer_cancelled_total{model="fake_llm",stage="running",version="1"} 2.0' in text
        assert 'code="499"' in text


def test_deadline_expires_in_queue_and_while_running(tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.01)
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        body: JSON = {"model": "fake_llm", "prompt": "x", "max_tokens": 62, "timeout": 0.08}
        answer = raw.post("/v1/completions", json=body)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
        answer = raw.post("/v1/completions", json={**body, "stream": True})
        assert answer.status_code == 200
        assert "[DONE]" not in answer.text
        assert json.loads(answer.text.rpartition("data: ")[2])["error"]["code"] == "deadline_exceeded"
        engine.gate.clear()
        answer = raw.post("/v1/completions", json=body)
        assert "in the queue" in answer.json()["error"]["message"]
        body = {"model": "fake_llm", "prompt": "x"}
        headers = {"X-Request-Timeout-Ms": "50"}
        assert raw.post("/v1/completions", json=body, headers=headers).status_code == 504
        wait_until(lambda: len(engine.cancelled) == 4)
        assert server.service.generators["fake_llm"].admission.queue.tokens == 0


def test_full_queue_returns_429_with_retry_after(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    limits = ServeLimits(max_queue_requests=2, max_queue_tokens=20)
    with (
        live(FakeLLMPredictor(tmp_path, engine=engine), limits=limits) as server,
        httpx.Client(base_url=server.url) as raw,
    ):
        model = server.service.generators["fake_llm"]
        url, body = f"{server.url}/v1/completions", {"model": "fake_llm", "prompt": "x", "max_tokens": 1}
        got: list[int] = []
        threads = [
            threading.Thread(target=lambda: got.append(httpx.post(url, json=body, timeout=20).status_code))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: model.waiting == 2)
        began = time.monotonic()
        for stream in (False, True):
            refused = raw.post(url, json={**body, "stream": stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-should-retry"] == "true"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert time.monotonic() - began < 1
        engine.gate.set()
        for thread in threads:
            thread.join()
        assert got == [200, 200]
        assert raw.post(url, json={**body, "prompt": "x" * 30}).status_code == 429
        assert raw.post(url, json=body).status_code == 200
        text = raw.get("/metrics").text
        assert 'infer_rejected_total{model="fake_llm",reason="overloaded",version="1"} 3.0' in text


def test_long_predicted_waits_are_rejected_urgent_requests_admitted(tmp_path: Path) -> None:
    with slow_speaker(tmp_path) as (raw, model, engine):
        url, body = (
            raw.base_url.join("/v1/completions"),
            {"model": "fake_llm", "prompt": "x", "max_tokens": 1},
        )
        first = threading.Thread(target=lambda: httpx.post(url, json=body, timeout=20))
        first.start()
        wait_until(lambda: model.waiting == 1)
        refused = raw.post(url, json={**body, "timeout": 20})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "30"
        assert refused.headers["retry-after-ms"] == "30000"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert model.admission.predicted_wait(-1) == 0, "a step of priority is worth as long as in the engine"
        assert EngineLimits().aging == AGING
        engine.gate.set()
        assert raw.post(url, json={**body, "timeout": 20, "priority": -1}).status_code == 200
        first.join()


def test_predicted_wait_includes_margin_after_underestimates(tmp_path: Path) -> None:
    with slow_speaker(tmp_path) as (raw, model, engine):
        url, body = (
            raw.base_url.join("/v1/completions"),
            {"model": "fake_llm", "prompt": "x", "max_tokens": 1},
        )
        threads = [
            threading.Thread(target=lambda: httpx.post(url, json={**body, "timeout": 40}, timeout=20))
            for _ in range(2)
        ]
        threads[0].start()
        wait_until(lambda: model.waiting == 1)
        model.admission.wait_error.observe(10.0, 15.0)
        assert raw.post(url, json={**body, "timeout": 40}).status_code == 429
        model.admission.wait_error = WaitErrorModel()
        threads[1].start()
        wait_until(lambda: model.waiting == 2)
        engine.gate.set()
        for thread in threads:
            thread.join()
        assert model.admission.wait_error.caution(1.0) > 0, "they came at once"


def test_rejected_prompts_are_not_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    limits = ServeLimits(max_queue_requests=1)
    with live(FakeLLMPredictor(tmp_path, engine=engine), limits=limits) as server:
        model = server.service.generators["fake_llm"]
        url, body = f"{server.url}/v1/completions", {"model": "fake_llm", "prompt": "x", "max_tokens": 1}
        first = threading.Thread(target=lambda: httpx.post(url, json=body, timeout=20))
        first.start()
        wait_until(lambda: model.waiting == 1)
        monkeypatch.setattr(model, "text", None)
        assert httpx.post(url, json=body).status_code == 429
        monkeypatch.undo()
        engine.gate.set()
        first.join()


def test_prefill_rate_is_measured_in_prompt_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.02)
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        model = server.service.generators["fake_llm"]
        for _ in range(8):
            body = {"model": "fake_llm", "prompt": "x" * 19, "max_tokens": 1}
            assert raw.post("/v1/completions", json=body).status_code == 200
        assert model.admission.predicted_wait() == 0
        assert model.admission.prefill_rate.seconds(20) >= 0.02


def test_queued_stream_gets_keepalive_pings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.02)
    engine = FakeEngine()
    engine.gate.clear()
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        body = {"model": "fake_llm", "prompt": "x", "max_tokens": 2, "stream": True}
        with raw.stream("POST", "/v1/completions", json=body) as answer:
            texts = answer.iter_text()
            assert next(texts) == ": ping\n\n"
            engine.gate.set()
            rest = "".join(texts)
        assert rest.endswith("data: [DONE]\n\n")


def test_engine_death_fails_every_stream_and_health(tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.01)
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        body = {"model": "fake_llm", "prompt": "x", "max_tokens": 60, "stream": True}
        with raw.stream("POST", "/v1/completions", json=body) as answer:
            texts = answer.iter_text()
            next(texts)
            assert raw.post("/v1/completions", json={"model": "fake_llm", "prompt": "#"}).status_code == 500
            rest = "".join(texts)
        assert '"error"' in rest
        assert "[DONE]" not in rest
        wait_until(lambda: raw.get("/health").status_code == 503)
        assert raw.get("/ready").status_code == 503
        assert server.service.died


def test_draining_finishes_admitted_requests_and_admits_none(tmp_path: Path) -> None:
    engine = FakeEngine(seconds=0.01)
    with live(FakeLLMPredictor(tmp_path, engine=engine)) as server, httpx.Client(base_url=server.url) as raw:
        body = {"model": "fake_llm", "prompt": "x", "max_tokens": 40, "stream": True}
        with raw.stream("POST", "/v1/completions", json=body) as answer:
            texts = answer.iter_text()
            first = next(texts)
            server.service.drain()
            assert not server.service.idle
            refused = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False})
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            text = first + "".join(texts)
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"text"') == 40
        wait_until(lambda: server.service.idle)


@pytest.mark.parametrize("cut_short", [False, True])
def test_sigterm_finishes_streams_or_ends_them_with_an_error(tmp_path: Path, cut_short: bool) -> None:
    """Exit at a second signal though streams run; they would take at least 15 s, or 3 s."""
    seconds = "0.25" if cut_short else "0.05"  # long enough to be asked while it drains, on a busy machine
    command = [sys.executable, "-m", "tests.support.fake_llm", str(tmp_path), seconds, "60"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=Path(__file__).resolve().parents[3], **pipes) as running:
        try:
            url = re.findall(r"http://127\.0\.0\.1:\d+", running.stdout.readline())[0]
            body = {"model": "fake_llm", "prompt": "x", "max_tokens": 60, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
                texts = answer.iter_text()
                text = next(texts)
                running.send_signal(signal.SIGTERM)
                wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
                refused = httpx.post(f"{url}/v1/completions", json={**body, "stream": False})
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                if cut_short:
                    running.send_signal(signal.SIGTERM)
                text += "".join(texts)
            assert running.wait(20) == 0
            assert running.stderr.read() == ""
        finally:
            if running.poll() is None:
                running.kill()
    if cut_short:
        assert json.loads(text.rpartition("data: ")[2])["error"]["message"] == "the server is stopping"
        assert "[DONE]" not in text
    else:
        assert text.count('"text"') == 60
        assert text.endswith("data: [DONE]\n\n")
