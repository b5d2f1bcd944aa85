"""Language models in worker processes: tokens, cancellation, crash retries and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from infer.errors import PoisonError
from infer.llm.engine.requests import Output, Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.serve.workers import remote_engine
from infer.serve.workers.crash_retry import FailedOutput, RequestTable, RestartedOutput
from infer.serve.workers.messages import EngineStatus, ModelSource
from infer.serve.workers.model_loading import served_language_model
from infer.serve.workers.remote_engine import RemoteEngine
from infer.serve.workers.restart_policy import (
    RestartLimitError,
    RestartLimits,
    WatchdogLimits,
    WorkerLostError,
)
from infer.serve.workers.supervisor import SupervisedWorker
from tests.support.fake_predictors import Live, live
from tests.support.worker_models import alive, language_model, running_pid, wait_until

pytestmark = pytest.mark.chaos


@contextlib.contextmanager
def served(folder: Path, seconds: float = 0.0, **watch: float) -> Iterator[tuple[Live, RemoteEngine]]:
    source = ModelSource(
        path=str(folder), opener="tests.support.worker_models:fake_llm", options={"seconds": seconds}
    )
    worker = SupervisedWorker(source, watch=WatchdogLimits(**watch), restart=RestartLimits(first=0.01))
    worker.start()
    model = served_language_model(worker, worker.wait(), language_model)
    engine: Any = model.language_model.engine_client  # type: ignore[union-attr]
    with live(model) as server:
        yield server, engine


def take_written(table: RequestTable) -> list[Request]:
    """Return the requests that the worker may get now, marked as written."""
    epoch, requests = table.take_pending()
    for request in requests:
        table.mark_written(request.id, epoch)
    return requests


def ask(server: Live, prompt: str, **options: Any) -> httpx.Response:
    body = {"model": "fake_llm", "prompt": prompt, "max_tokens": 5, **options}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def test_worker_serves_full_and_streamed_completions(tmp_path: Path) -> None:
    with served(tmp_path) as (server, engine):
        assert engine.worker.pid != os.getpid()
        assert ask(server, "x").json()["choices"][0]["text"] == "ABCDE"
        answers = [ask(server, "x", n=2, logprobs=1).json() for _ in range(3)]
        assert all([choice["text"] for choice in a["choices"]] == ["ABCDE", "BCDEF"] for a in answers)
        streamed = ask(server, "x", stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert streamed.text.count('"text"') >= 1
        assert ask(server, "%").status_code in (400, 500)  # what only the engine knows
        assert ask(server, "!").status_code == 500
        assert ask(server, "x").status_code == 200
        text = httpx.get(f"{server.url}/metrics").text
        assert 'infer_engine_steps_total{model="fake_llm",version="1"}' in text
        assert engine.deaths == 0


def test_engine_rejections_keep_their_message(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _):
        refused = ask(server, "%")
        assert refused.status_code == 400
        assert "no percentages" in refused.text
        wrong = ask(server, "x", structured_outputs={"regex": "("})
        assert wrong.status_code == 422
        assert "this regex can't be read" in wrong.text
        assert ask(server, "x", structured_outputs={"regex": "a+"}).status_code == 200


def test_a_grammar_whose_worker_died_is_compiled_once_more(tmp_path: Path) -> None:
    with served(tmp_path) as (server, engine):
        assert ask(server, "x", structured_outputs={"regex": "dies once"}).status_code == 200
        assert engine.deaths == 1
        failed = ask(server, "x", structured_outputs={"regex": "dies"})
        assert failed.json()["error"]["code"] == "worker_died"
        assert "died twice while it compiled the grammar" in failed.text
        wait_until(lambda: engine.ready)
        assert ask(server, "x", structured_outputs={"regex": "a+"}).status_code == 200


def test_disconnected_client_is_cancelled_in_the_worker(tmp_path: Path) -> None:
    with served(tmp_path, seconds=0.02) as (server, engine):
        body = {"model": "fake_llm", "prompt": "x", "max_tokens": 60, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            next(answer.iter_text())
        generator = server.service.generators["fake_llm"]
        wait_until(lambda: generator.idle)
        assert not engine._table.sent
        assert ask(server, "x").status_code == 200


def test_after_sigkill_queued_requests_are_answered_and_streams_fail(tmp_path: Path) -> None:
    with served(tmp_path, seconds=0.02) as (server, engine):
        first = running_pid(engine.worker.pid)
        body = {"model": "fake_llm", "prompt": "x", "max_tokens": 60, "stream": True}
        answers: list[httpx.Response] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            texts = answer.iter_text()
            text = next(texts)
            os.kill(first, signal.SIGSTOP)
            waiting = [threading.Thread(target=lambda: answers.append(ask(server, "y"))) for _ in range(3)]
            for thread in waiting:
                thread.start()
            wait_until(lambda: engine._table.sent == 4)
            assert httpx.get(f"{server.url}/health").status_code == 200
            os.kill(first, signal.SIGKILL)
            text += "".join(texts)
        for thread in waiting:
            thread.join()
        assert [a.json()["choices"][0]["text"] for a in answers] == ["ABCDE"] * 3
        assert '"worker_died"' in text
        assert "[DONE]" not in text
        assert engine.deaths == 1
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert engine.worker.pid != first


@pytest.mark.parametrize("poison", ["^", "#"])
def test_prompt_that_kills_two_workers_is_quarantined_others_succeed(tmp_path: Path, poison: str) -> None:
    with served(tmp_path) as (server, engine):
        answers: dict[str, httpx.Response] = {}
        threads = [
            threading.Thread(target=lambda p=prompt: answers.__setitem__(p, ask(server, p)))
            for prompt in ("a", "b", poison, "c")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {p: a.status_code for p, a in answers.items()} == {"a": 200, "b": 200, poison: 500, "c": 200}
        assert answers[poison].json()["error"]["code"] == "poison_request"
        wait_until(lambda: engine.deaths == 2)
        assert ask(server, poison).json()["error"]["code"] == "poison_request"
        assert engine.deaths == 2
        assert ask(server, "d").status_code == 200


def test_hanging_step_is_killed(tmp_path: Path) -> None:
    with served(tmp_path, batch=1.0) as (server, engine):
        first = running_pid(engine.worker.pid)
        assert ask(server, "~").json()["error"]["code"] == "poison_request"
        assert not alive(first)
        assert ask(server, "x").status_code == 200


@pytest.mark.parametrize(("usual", "patience"), [(0.0, 1), (0.4, 4), (3.0, 10)])
def test_step_timeout_is_ten_times_the_usual_step(
    monkeypatch: pytest.MonkeyPatch, usual: float, patience: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(remote_engine, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker: Any = SupervisedWorker(ModelSource(path="nowhere"), watch=WatchdogLimits(batch=1.0))
    worker.receive = lambda *_: EngineStatus(now[0], {"steps": 1})
    worker.close()  # its threads have nothing to do
    engine_client = remote_engine.RemoteEngine(worker, name="fake_llm")
    engine_client._table = RequestTable()
    engine_client._table.add(_request("a"), lambda _: None)
    assert take_written(engine_client._table)
    for _ in range(3):  # it was away for so long, and turned
        turned, now[0] = now[0], now[0] + usual
        engine_client._take(EngineStatus(turned, {}))
        engine_client._take(EngineStatus(now[0], {}))
    for _ in range(2 * patience - 1):
        now[0] += 0.5
        engine_client._take(EngineStatus(turned + usual, {}))
        engine_client._watch()
    now[0] += 0.6
    with pytest.raises(WorkerLostError, match=f"killed after {patience} s of silence"):
        engine_client._watch()
    engine_client.close()


def test_worker_stopped_while_idle_is_replaced(tmp_path: Path) -> None:
    with served(tmp_path, idle=1.5) as (server, engine):
        first = running_pid(engine.worker.pid)
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: not alive(first))
        assert ask(server, "x").status_code == 200


def test_many_killing_prompts_do_not_end_the_llm_server(tmp_path: Path) -> None:
    with served(tmp_path) as (server, engine):
        for number in range(4):
            assert ask(server, f"^{number}").json()["error"]["code"] == "poison_request"
        wait_until(lambda: engine.deaths == 8)
        assert ask(server, "x").status_code == 200


def test_stream_that_kills_two_workers_midway_is_quarantined(tmp_path: Path) -> None:
    with served(tmp_path) as (server, engine):
        answers = [ask(server, "$", stream=True) for _ in range(3)]
        assert ['"worker_died"' in answer.text for answer in answers] == [True, True, False]
        assert answers[2].json()["error"]["code"] == "poison_request"
        wait_until(lambda: engine.deaths == 2)
        assert ask(server, "x").status_code == 200


def test_identical_streams_in_one_crash_are_not_quarantined() -> None:
    table, told = RequestTable(), list[Output]()
    for death in range(3):
        for name in ("a", "b"):
            table.add(_request(f"{name}{death}"), told.extend)
        table.deliver([Output(id=r.id, index=0, token_ids=(1,)) for r in take_written(table)])
        assert _died(table) == 0
    assert len(table.quarantine) == 0


def test_restart_limit_fails_all_requests(tmp_path: Path) -> None:
    with served(tmp_path) as (server, engine):
        for number in range(5):
            pid = running_pid(engine.worker.pid)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda n=number: engine.deaths > n)
            wait_until(lambda: engine.ready or engine.failure is not None)
        wait_until(lambda: engine.failure is not None)
        assert isinstance(engine.failure, RestartLimitError)
        assert server.service.died
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert ask(server, "x").status_code == 503


def _died(table: RequestTable) -> int:
    """Kill the worker and wait for the next one."""
    guilty = table.on_worker_death()
    table.on_worker_restart()
    return guilty


def _request(name: str, prompt: int = 1) -> Request:
    return Request(id=name, prompt=[prompt], sampling=Sampling(max_tokens=3))


def test_crash_suspects_are_retried_one_at_a_time() -> None:
    table, told = RequestTable(), list[Output]()
    for name in "abc":
        table.add(_request(name, ord(name)), told.extend)
    assert [request.id for request in take_written(table)] == ["a", "b", "c"]
    table.deliver([Output(id="a", index=0, token_ids=(1,))])
    _died(table)
    assert [(o.id, type(o)) for o in told] == [("a", Output), ("a", FailedOutput)]
    table.add(_request("new"), told.extend)
    assert [request.id for request in take_written(table)] == ["b"]
    assert take_written(table) == []
    _died(table)
    assert isinstance(told[-1].error, PoisonError)
    with pytest.raises(PoisonError):
        table.add(_request("again", ord("b")), told.extend)
    assert [request.id for request in take_written(table)] == ["c"]
    assert table.deliver([Output(id="c", index=0, token_ids=(1,), finish="length")])
    assert [request.id for request in take_written(table)] == ["new"]
    assert table.sent
    assert table.remove("new")
    assert not table.sent


def test_cleared_request_is_not_blamed_for_the_next_crash() -> None:
    table, told = RequestTable(), list[Output]()
    for name in "ab":
        table.add(_request(name, ord(name)), told.extend, replay=True)
    assert len(take_written(table)) == 2
    assert _died(table) == 0
    assert [request.id for request in take_written(table)] == ["a"]
    table.deliver([Output(id="a", index=0, token_ids=(1,))])
    assert [request.id for request in take_written(table)] == ["b"]
    assert _died(table) == 2
    assert [(o.id, type(o)) for o in told[1:]] == [("a", RestartedOutput), ("b", FailedOutput)]
    assert [request.id for request in take_written(table)] == ["a"]
    table.add(_request("new"), told.extend)
    table.deliver([Output(id="a", index=0, token_ids=(1,))])
    assert take_written(table) == []  # until its end, this time
    table.deliver([Output(id="a", index=0, token_ids=(1,), finish="length")])
    assert [request.id for request in take_written(table)] == ["new"]


def test_request_that_kills_after_its_first_token_is_identified() -> None:
    table, told = RequestTable(), list[Output]()
    token = [Output(id="b", index=0, token_ids=(1,))]
    table.add(_request("b", ord("b")), told.extend, replay=True)
    for name in ("c", "d"):
        assert [request.id for request in take_written(table)] == ["b"]
        table.deliver(token)
        if name == "d":
            break
        assert _died(table) == 0
        assert [request.id for request in take_written(table)] == ["b"]
        table.deliver(token)
        table.add(_request(name, ord(name)), told.extend)
        assert [request.id for request in take_written(table)] == [name]
        assert _died(table) == 0
    assert take_written(table) == []
    assert _died(table) == 3
    assert isinstance(told[-1].error, PoisonError)
    assert [request.id for request in take_written(table)] == ["c"]
