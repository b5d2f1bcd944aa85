"""Metrics are consistent: every request is counted once, also when refused, expired or cancelled."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.cli import main
from infer.cli.top import HEADS, Readings, read
from infer.llm.engine.stats import EngineStats
from infer.serve.limits import ServeLimits
from infer.serve.observability.prometheus_text import LogHistogram, Registry, percentile
from tests.support.fake_llm import FakeEngine, FakeLLMPredictor
from tests.support.fake_predictors import Live, double, embedder, live

TENSORS = "/v2/models/double/infer"
SPECIFIED = [
    *("requests_total", "requests_running", "requests_waiting", "queue_seconds"),
    *("request_seconds", "compute_seconds", "batch_size", "batch_tokens", "padding_ratio"),
    *("dispatch_total", "rejected_total", "cancelled_total", "deadline_exceeded_total"),
    *(
        "time_to_first_token_seconds",
        "inter_token_seconds",
        "prefill_seconds",
        "decode_seconds",
        "prompt_tokens_total",
    ),
    *(
        "generation_tokens_total",
        "kv_cache_usage_ratio",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
    ),
    *("preemptions_total", "spec_draft_tokens_total", "spec_accepted_tokens_total", "memory_bytes"),
    *("engine_heartbeat_age_seconds", "build_info"),
]


def body(value: float = 1.0, rows: int = 1, **parameters: Any) -> dict[str, Any]:
    given = {"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": [value] * 4 * rows}
    return {"inputs": [given], "parameters": parameters}


def count(server: Live, name: str, **labels: str) -> float:
    """Add up a counter's samples with these labels."""
    found = 0.0
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        match = re.fullmatch(rf"infer_{name}(?:{{(.*)}})? (\S+)", line)
        if match:
            has = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
            found += float(match[2]) if labels.items() <= has.items() else 0
    return found


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def live_server(tmp_path: Path) -> Iterator[Live]:
    with live(
        double(), embedder(), FakeLLMPredictor(tmp_path, engine=FakeEngine(0.005), context=4096)
    ) as server:
        yield server


def test_every_specified_metric_name_exists(live_server: Live) -> None:
    httpx.post(f"{live_server.url}{TENSORS}", json=body())
    httpx.post(
        f"{live_server.url}/v1/completions", json={"model": "fake_llm", "prompt": "a", "max_tokens": 2}
    )
    httpx.post(f"{live_server.url}/v1/embeddings", json={"model": "embedder", "input": "a"})
    text = httpx.get(f"{live_server.url}/metrics").text
    missing = [name for name in SPECIFIED if not re.search(rf"^infer_{name}(_bucket)?[{{ ]", text, re.M)]
    assert missing == []


def test_metrics_text_parses_with_prometheus_client(live_server: Live) -> None:
    httpx.post(f"{live_server.url}{TENSORS}", json=body())
    httpx.post(
        f"{live_server.url}/v1/completions", json={"model": "fake_llm", "prompt": "a", "max_tokens": 2}
    )
    answer = httpx.get(f"{live_server.url}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {f.name: f for f in text_string_to_metric_families(answer.text)}
    assert families["infer_requests"].type == "counter"
    assert families["infer_requests_running"].type == "gauge"
    spread = families["infer_request_seconds"]
    assert spread.type == "histogram"
    for model in ("double", "fake_llm"):
        buckets = [
            s.value for s in spread.samples if s.name.endswith("_bucket") and s.labels["model"] == model
        ]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 1
    assert all(family.documentation for family in families.values())
    seen = [(s.name, tuple(sorted(s.labels.items()))) for f in families.values() for s in f.samples]
    assert len(seen) == len(set(seen))


def test_labels_and_numbers_are_escaped_per_text_format() -> None:
    registry = Registry()
    registry.gauge("g", "a\\b\nc", ("l",)).labels('q"\\\n').set(float("nan"))
    registry.gauge("i", "i").labels().set(float("-inf"))
    registry.histogram("h", "h", (), (0.5, 1.0)).labels().observe(0.75)
    assert registry.text().decode().splitlines() == [
        *(
            "# HELP g a\\\\b\\nc",
            "# TYPE g gauge",
            'g{l="q\\"\\\\\\n"} NaN',
            "# HELP i i",
            "# TYPE i gauge",
            "i -Inf",
        ),
        *("# HELP h h", "# TYPE h histogram", 'h_bucket{le="0.5"} 0.0', 'h_bucket{le="1.0"} 1.0'),
        *('h_bucket{le="+Inf"} 1.0', "h_sum 0.75", "h_count 1.0"),
    ]


def test_dashboard_queries_existing_metrics_only(live_server: Live) -> None:
    httpx.post(f"{live_server.url}{TENSORS}", json=body())
    text = httpx.get(f"{live_server.url}/metrics").text
    shown = json.loads((Path(__file__).resolve().parents[2] / "docs/grafana.json").read_text())
    asked = [target["expr"] for panel in shown["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"infer_\w+", expression)}
    assert len(names) > 15
    assert [name for name in names if not re.search(rf"^{name}[{{ ]", text, re.M)] == []


def test_top_shows_one_row_per_model(
    live_server: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    for _ in range(5):
        httpx.post(f"{live_server.url}{TENSORS}", json=body(rows=2))
    assert main(["top", live_server.url, "--once", "--interval", "0.2"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("ready", "double", "embedder", "fake_llm", "p99"))
    readings = Readings()
    readings.add(read(live_server.url, None))
    httpx.post(
        f"{live_server.url}/v1/completions", json={"model": "fake_llm", "prompt": "hi", "max_tokens": 5}
    )
    for _ in range(4):
        httpx.post(f"{live_server.url}{TENSORS}", json=body(rows=2))
    readings.add(read(live_server.url, None))
    rows = {name: dict(zip(HEADS, readings.row(name), strict=True)) for name in ("double", "fake_llm")}
    assert rows["double"]["batch"] == "2.0"
    assert rows["fake_llm"]["per second"].endswith(" tokens")
    assert rows["double"]["p99"].endswith("s")
    assert rows["double"]["refused"] == rows["double"]["failed"] == "0"


@pytest.mark.parametrize(("url", "code"), [("localhost", 2), ("http://127.0.0.1:1", 5)])
def test_top_reports_a_bad_address(url: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url]) == code
    assert url in capsys.readouterr().err


def test_status_names_the_server_instance(live_server: Live) -> None:
    first, second = (httpx.get(f"{live_server.url}/ops/now").json() for _ in range(2))
    assert first["instance"] == second["instance"]
    assert first["time"] < second["time"]
    with live(double()) as other:
        assert httpx.get(f"{other.url}/ops/now").json()["instance"] != first["instance"]


def test_requests_are_counted_once_by_status(live_server: Live) -> None:
    outcomes = [(body(), 200)] * 7 + [(body(666.0), 500)] * 3 + [({"inputs": []}, 400)] * 5
    for asked, status in outcomes:
        assert httpx.post(f"{live_server.url}{TENSORS}", json=asked).status_code == status
    for status, times in ((200, 7), (500, 3), (400, 5)):
        assert count(live_server, "requests_total", model="double", code=str(status), api="kserve") == times
    assert count(live_server, "request_seconds_count", model="double") == 15
    assert count(live_server, "queue_seconds_count", model="double") == 7
    now = httpx.get(f"{live_server.url}/ops/now").json()["models"]["double"]
    assert now["requests"] == {"200": 7, "500": 3, "400": 5}
    assert sum(now["request_times"].values()) == 7


def test_disconnected_clients_count_as_cancelled(live_server: Live) -> None:
    asked = {"model": "fake_llm", "prompt": "hi", "max_tokens": 4000, "stream": True}
    for _ in range(6):
        with httpx.stream("POST", f"{live_server.url}/v1/completions", json=asked) as answer:
            next(answer.iter_lines())
    until(lambda: count(live_server, "cancelled_total", model="fake_llm", stage="running") == 6)
    assert count(live_server, "requests_total", model="fake_llm", code="499") == 6
    assert count(live_server, "requests_total", model="fake_llm", code="200") == 0
    assert count(live_server, "requests_running", model="fake_llm") == 0
    assert count(live_server, "completions_total", model="fake_llm") == 0


def test_expired_and_rejected_requests_have_their_counters() -> None:
    limits = ServeLimits(max_queue_requests=2, max_batch=1)
    model, go_on = double(), threading.Event()
    compute = model.function
    model.function = lambda inputs: compute(inputs) if go_on.wait(20) else {}
    with live(model, limits=limits) as server:
        statuses: list[int] = []

        def ask(parameters: dict[str, Any]) -> None:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.post(f"{server.url}{TENSORS}", json=body(**parameters), timeout=20)
                statuses.append(answer.status_code)

        ask({"timeout": 50_000})
        assert statuses == [504]
        threads = [threading.Thread(target=ask, args=({},)) for _ in range(8)]
        for thread in threads:
            thread.start()
        # Two wait; before them the late one still runs, or one of these if it was late in the queue already.
        until(lambda: len(statuses) >= 6 and count(server, "requests_waiting") == 2)
        go_on.set()
        for thread in threads:
            thread.join()
        refused, done = statuses.count(503), statuses.count(200)
        assert refused + done == 8
        assert refused >= 5
        assert count(server, "deadline_exceeded_total") == 1
        assert count(server, "rejected_total", reason="overloaded") == refused
        assert count(server, "requests_total", model="double", code="503") == refused
        assert count(server, "requests_total", model="double", code="200") == done
        assert count(server, "requests_waiting") == 0
        until(lambda: count(server, "requests_running") == 0)  # an answer leaves before its batch is over


def test_token_counts_and_latencies_are_consistent(live_server: Live) -> None:
    for _ in range(3):
        httpx.post(
            f"{live_server.url}/v1/completions", json={"model": "fake_llm", "prompt": "hi", "max_tokens": 5}
        )
    assert count(live_server, "generation_tokens_total", model="fake_llm") == 15
    assert count(live_server, "inter_token_seconds_count", model="fake_llm") == 12
    assert count(live_server, "time_to_first_token_seconds_count", model="fake_llm") == 3
    for name in ("decode_seconds", "prefill_seconds", "queue_seconds"):
        assert count(live_server, f"{name}_count", model="fake_llm") == 3
    now = httpx.get(f"{live_server.url}/ops/now").json()["models"]["fake_llm"]
    assert now["tokens"] == 15
    assert sum(now["inter_token_times"].values()) == 12
    assert sum(now["first_token_times"].values()) == 3


def test_batch_tokens_are_rows_times_length(live_server: Live) -> None:
    httpx.post(f"{live_server.url}/v1/embeddings", json={"model": "embedder", "input": ["a", "bcd"]})
    assert (
        count(live_server, "batch_tokens_sum", model="embedder") == 2 * 4
    )  # as the tokenizer gave them, with a begin
    assert count(live_server, "batch_tokens_count", model="double") == 0


def test_step_token_histogram_is_read_at_scrape() -> None:
    stats, registry = EngineStats(), Registry()
    spread = registry.histogram("t", "t", (), (1, 2, 4)).labels()
    spread.set_function(lambda: (stats.step_tokens, stats.prefill_tokens + stats.decode_tokens))
    assert "t_count 0.0" in registry.text().decode()
    for prefill, decoded in ((0, 1), (1, 1), (3, 0), (0, 4), (500, 20)):
        stats.count(prefill, decoded, (0.0, 0.0, 0.0, 0.0))
    assert stats.step_tokens[:3] == [1, 1, 2]
    lines = registry.text().decode().splitlines()[2:]
    assert lines == [
        *('t_bucket{le="1"} 1.0', 't_bucket{le="2"} 2.0', 't_bucket{le="4"} 4.0', 't_bucket{le="+Inf"} 5.0'),
        *("t_sum 530.0", "t_count 5.0"),
    ]


def test_resident_memory_matches_the_kernel(live_server: Live) -> None:
    resident = count(live_server, "memory_bytes", kind="resident")
    assert 50e6 < resident <= count(live_server, "memory_bytes", kind="peak")


@pytest.mark.parametrize("seconds", [2e-6, 0.00037, 0.0123, 1.0, 59.0])
def test_percentile_of_log_histogram_is_accurate(seconds: float) -> None:
    times = LogHistogram()
    for _ in range(90):
        times.observe(seconds)
    for _ in range(10):
        times.observe(8 * seconds)
    for share, expected in ((0.5, seconds), (0.89, seconds), (0.95, 8 * seconds), (0.99, 8 * seconds)):
        found = percentile(times.counts, share)
        assert found == pytest.approx(expected, rel=0.046)
    assert percentile({}, 0.5) is None
