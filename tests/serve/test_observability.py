"""Observability of a request: its id, log line, trace, spans and counters."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.serve.http.trace_context import parse_trace
from infer.serve.observability.request_log import LineWriter, RequestLog, rfc3339
from infer.serve.workers.messages import ModelSource
from infer.serve.workers.model_loading import StartingModel
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import Live, double, embedder, live

DATA = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
TENSORS = "/v2/models/double/infer"


class Memory:
    """Lines as a list."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def put(self, line: bytes) -> None:
        self.lines.append(line)

    def close(self) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with live(
        double(), embedder(), FakeLLMPredictor(tmp_path, engine=FakeEngine(0.01), context=4096)
    ) as server:
        server.memory = Memory()
        server.service.observers.append(RequestLog(server.memory))
        yield server


@pytest.fixture
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def log_lines(server: Live, count: int) -> list[dict[str, Any]]:
    """So many lines; the line is written once the answer is."""
    until(lambda: len(server.memory.lines) >= count)
    return [json.loads(line) for line in server.memory.lines]


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_request_log_has_one_line_with_timings(server: Live, client: httpx.Client) -> None:
    assert (
        client.post(TENSORS, json=DATA, headers={"X-Request-Id": "mine", "User-Agent": "me"}).status_code
        == 200
    )
    (line,) = log_lines(server, 1)
    assert re.fullmatch(r"2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    for name in ("ms", "queue_ms", "compute_ms"):
        assert line.pop(name) >= 0
    assert line == {
        **{
            "level": "info",
            "event": "request",
            "id": "mine",
            "method": "POST",
            "status": 200,
            "api": "kserve",
        },
        **{"route": "/v2/models/{model}/infer", "client": "127.0.0.1", "agent": "me", "batch": 1},
        **{"model": "double", "version": "1", "bytes_in": len(json.dumps(DATA, separators=(",", ":")))},
    }


def test_stream_log_line_has_tokens_and_latencies(server: Live, client: httpx.Client) -> None:
    asked = {
        "model": "fake_llm",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "stream": True,
    }
    client.post("/v1/chat/completions", json=asked)
    (line,) = log_lines(server, 1)
    assert (line["model"], line["tokens"], line["status"]) == ("fake_llm", 5, 200)
    assert line["prompt_tokens"] > 2
    assert line["first_token_ms"] > 0
    assert line["stream_ms"] > 0


def test_disconnected_client_is_logged_as_499_with_its_tokens(server: Live) -> None:
    asked = {"model": "fake_llm", "prompt": "hi", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked) as answer:
        next(answer.iter_lines())
    (line,) = log_lines(server, 1)
    assert (line["status"], line["level"]) == (499, "info")
    assert 0 < line["tokens"] < 4000


def test_prompts_and_outputs_are_not_logged(server: Live, client: httpx.Client) -> None:
    secret = "the secret of a client"
    client.post("/v1/completions", json={"model": "fake_llm", "prompt": secret, "max_tokens": 2})
    client.post("/v1/embeddings", json={"model": "embedder", "input": secret})
    client.post("/v1/completions", json={"model": "fake_llm", "prompt": secret, "max_tokens": -1})
    client.get(f"/v2/models/{secret}")
    assert len(log_lines(server, 4)) == 4
    assert not any(secret.encode() in line for line in server.memory.lines)


def test_successful_health_and_page_requests_are_not_logged(server: Live, client: httpx.Client) -> None:
    for path in ("/health", "/metrics", "/ops/now", "/", "/page/app.js"):
        assert client.get(path).status_code == 200
    client.get("/nope")
    (line,) = log_lines(server, 1)
    assert (line["status"], line["route"], line["error"], line["level"]) == (404, "", "not_found", "warning")


@pytest.mark.parametrize("said", ["\x1b[31mred", "a\nb", 'quote"', "‮", "\x9b31m", "x" * 9000])
def test_client_strings_cannot_inject_terminal_escapes(server: Live, said: str) -> None:
    call = "POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nuser-agent: "
    agent = said.replace("\n", "\t").encode("utf-8", "surrogateescape")
    with httpx.Client(base_url=server.url) as client:
        client.post(TENSORS, content=b"{}", headers={b"user-agent": agent.replace(b"\x1b", b"\xc2\x9b")})
    (line,) = log_lines(server, 1)
    raw = server.memory.lines[0].decode()
    assert call
    assert raw.count("\n") == 1
    assert raw[:-1].isprintable()
    assert len(line["agent"]) <= 256 * 6


def test_bodies_are_logged_on_request_and_truncated(server: Live, client: httpx.Client) -> None:
    server.service.observers[:] = [RequestLog(server.memory, bodies=True)]
    client.post(
        "/v1/completions", json={"model": "fake_llm", "prompt": "what people wrote" * 1000, "max_tokens": 2}
    )
    (line,) = log_lines(server, 1)
    assert "what people wrote" in line["body"]
    assert len(line["body"]) <= 4096


def test_log_lines_queue_for_slow_readers_and_drops_are_counted() -> None:
    reader, writer = os.pipe()
    try:
        lines = LineWriter(writer, most=50)
        big = b"x" * 9999 + b"\n"
        began = time.monotonic()
        for _ in range(1000):
            lines.put(big)
        assert time.monotonic() - began < 5
        assert lines.dropped >= 1000 - 60
        got = b""
        while got.count(b"\n") < 1000 - lines.dropped:
            got += os.read(reader, 1 << 20)
        assert set(got.split(b"\n")) == {big[:-1], b""}
    finally:
        os.close(reader)
        lines.put(b"to nobody\n")
        lines.close()
        os.close(writer)
    assert lines.dropped > 940


def test_log_time_is_rfc_3339() -> None:
    assert rfc3339(1_700_000_000.0625) == "2023-11-14T22:13:20.062Z"


def test_trace_continues_with_a_server_span(server: Live, client: httpx.Client) -> None:
    answer = client.post(TENSORS, json=DATA, headers={"traceparent": PARENT})
    found = re.fullmatch(f"00-{TRACE}-([0-9a-f]{{16}})-01", answer.headers["traceresponse"])
    assert found
    assert found[1] != SPAN
    (line,) = log_lines(server, 1)
    assert (line["trace_id"], line["span_id"], line["parent_id"]) == (TRACE, found[1], SPAN)


def test_no_trace_without_traceparent(server: Live, client: httpx.Client) -> None:
    assert "traceresponse" not in client.post(TENSORS, json=DATA).headers
    assert "trace_id" not in log_lines(server, 1)[0]


@pytest.mark.parametrize(
    "value",
    [
        *("", "00", PARENT.upper(), PARENT + "-", PARENT + "0", f"ff-{TRACE}-{SPAN}-01", f"0-{TRACE}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}-{SPAN}-01"),
        *(f"00_{TRACE}_{SPAN}_01", f"00-{TRACE}-{SPAN}"),
        *(f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-0g", f"01-{TRACE}-{SPAN}-011", f"{PARENT},{PARENT}"),
    ],
)  # fmt: skip
def test_malformed_traceparent_is_ignored(value: str) -> None:
    assert parse_trace([(b"traceparent", value.encode())]) is None


def test_duplicate_traceparent_is_ignored_newer_version_is_parsed() -> None:
    assert parse_trace([(b"traceparent", PARENT.encode())] * 2) is None
    later = parse_trace([(b"traceparent", f"cc-{TRACE}-{SPAN}-03-what-comes".encode())])
    assert later is not None
    assert (later.id, later.parent, later.sampled) == (TRACE, SPAN, True)
    unsampled = parse_trace([(b"traceparent", f"00-{TRACE}-{SPAN}-02".encode())])
    assert unsampled is not None
    assert unsampled.header().endswith(b"-00")


@pytest.mark.parametrize(("state", "kept"), [("a=1,b=2", "a=1,b=2"), ("x" * 513, ""), ("a\x00", "")])
def test_tracestate_is_bounded_and_printable(state: str, kept: str) -> None:
    found = parse_trace([(b"traceparent", PARENT.encode()), (b"tracestate", state.encode())])
    assert found is not None
    assert found.state == kept


needs_otel = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.sdk") is None
    if importlib.util.find_spec("opentelemetry")
    else True,
    reason="opentelemetry-sdk is not installed: pip install 'infer-engine[otel]'",
)


def recorded(server: Live) -> Callable[[int], list[Any]]:
    """Spans are kept from now on; at least so many of them, once they are there."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from infer.serve.observability.tracing import SpanRecorder

    exporter = InMemorySpanExporter()
    server.service.observers.append(SpanRecorder(SimpleSpanProcessor(exporter)))
    server.service.traces = True

    def finished(count: int) -> list[Any]:
        until(lambda: len(exporter.get_finished_spans()) >= count)
        return sorted(exporter.get_finished_spans(), key=lambda span: span.kind.value, reverse=True)

    return finished


@pytest.fixture
def spans(server: Live) -> Callable[[int], list[Any]]:
    return recorded(server)


@needs_otel
def test_request_span_has_queue_and_compute_children(
    client: httpx.Client, spans: Callable[[int], list[Any]]
) -> None:
    answer = client.post(TENSORS, json=DATA, headers={"traceparent": PARENT, "tracestate": "a=1"})
    server_span = next(span for span in spans(3) if span.kind.name == "SERVER")
    inside = {span.name: span for span in spans(3) if span.kind.name != "SERVER"}
    assert set(inside) == {"queue", "compute"}
    assert f"{server_span.context.trace_id:032x}" == TRACE
    assert f"{server_span.parent.span_id:016x}" == SPAN
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{server_span.context.span_id:016x}-01"
    assert server_span.attributes["http.route"] == "/v2/models/{model}/infer"
    assert server_span.attributes["http.response.status_code"] == 200
    for part in inside.values():
        assert part.parent.span_id == server_span.context.span_id
        assert server_span.start_time <= part.start_time <= part.end_time <= server_span.end_time
    assert inside["queue"].end_time == inside["compute"].start_time


@needs_otel
def test_child_spans_stay_within_the_request_span(
    client: httpx.Client, spans: Callable[[int], list[Any]]
) -> None:
    """Milliseconds that were measured become nanoseconds since 1970, each rounded for itself."""
    for _ in range(40):
        client.post(TENSORS, json=DATA)
    found = {span.context.span_id: span for span in spans(3 * 40)}
    parts = [span for span in found.values() if span.kind.name != "SERVER"]
    assert len(parts) == 2 * 40
    for part in parts:
        whole = found[part.parent.span_id]
        assert whole.start_time <= part.start_time <= part.end_time <= whole.end_time


@needs_otel
def test_stream_has_its_own_span_and_traces_are_unique(
    client: httpx.Client, spans: Callable[[int], list[Any]]
) -> None:
    asked = {"model": "fake_llm", "prompt": "hi", "max_tokens": 5, "stream": True}
    told = [client.post("/v1/completions", json=asked).headers["traceresponse"] for _ in range(2)]
    found = spans(10)
    names = ["POST /v1/completions", "first token", "prefill", "queue", "stream"]
    assert sorted(span.name for span in found) == sorted(2 * names)
    first = {span.context.span_id for span in found if span.name == "first token"}
    assert {span.parent.span_id for span in found if span.name in ("queue", "prefill")} == first
    made = {f"{span.context.trace_id:032x}" for span in found}
    assert made == {text.split("-")[1] for text in told}
    assert len(made) == 2


@needs_otel
def test_worker_compute_span_is_in_the_batch_span_with_its_pid() -> None:
    source = ModelSource(
        path="faulty", opener="tests.support.worker_models:FaultyModel", options={"seconds": 0.05}
    )
    with contextlib.closing(StartingModel(source)) as starting, live(starting.wait_ready()) as server:
        finished = recorded(server)
        answer = httpx.post(
            f"{server.url}/v2/models/faulty/infer", json=DATA, headers={"traceparent": PARENT}
        )
        outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
        found = {span.name: span for span in finished(4)}
    assert set(found) == {"POST /v2/models/{model}/infer", "queue", "batch", "compute"}
    batch, compute = found["batch"], found["compute"]
    assert compute.attributes["process.pid"] == outputs["pid"][0] != os.getpid()
    assert compute.parent.span_id == batch.context.span_id
    assert f"{compute.context.trace_id:032x}" == TRACE
    assert compute.end_time - compute.start_time >= 50_000_000
    assert batch.start_time < compute.start_time
    assert compute.end_time < batch.end_time


@needs_otel
def test_unsampled_traces_are_not_recorded_errors_are_marked(
    client: httpx.Client, spans: Callable[[int], list[Any]]
) -> None:
    client.post(TENSORS, json=DATA, headers={"traceparent": PARENT[:-1] + "0"})
    client.post(TENSORS, json={"inputs": [{**DATA["inputs"][0], "data": [666.0] * 4}]})
    (found,) = spans(1)
    assert found.attributes["http.response.status_code"] == 500
    assert found.attributes["error.type"] == "internal"
    assert found.status.status_code.name == "ERROR"
