"""Idle self-test of workers: its schedule, changed outputs, and silent workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from infer.artifact.model_info import ModelInfo
from infer.errors import ArtifactError, InferError
from infer.llm.engine.requests import Output, Request
from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.workers import supervisor
from infer.serve.workers.messages import ModelSource
from infer.serve.workers.model_loading import StartingModel
from infer.serve.workers.self_test import (
    EVERY,
    MISSES,
    MOST_SHARE,
    PATIENCE,
    GoldenInputTest,
    GoldenPromptTest,
    outputs_match,
)
from infer.spec import TensorSpec
from tests.serve.workers.test_workers import FAST, ask, engine_of, remote
from tests.support.fake_predictors import double, live
from tests.support.worker_models import alive, running_pid, wait_until

pytestmark = pytest.mark.chaos


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


INPUTS = (TensorSpec("x", "float32", ("batch", 2)),)
OUTPUTS = (TensorSpec("y", "float32", ("batch", 2)),)


class Model:
    """y = factor·x; each answer takes `seconds` of the clock."""

    def __init__(self, folder: Path, clock: Clock, seconds: float = 0.0) -> None:
        self.info = ModelInfo(name="m", inputs=INPUTS, outputs=OUTPUTS, path=str(folder))
        self.clock, self.seconds = clock, seconds
        self.factor, self.rows = 2.0, list[int]()
        (folder / "golden").mkdir()
        save_file({"x": np.ones((3, 2), np.float32)}, folder / "golden/inputs.safetensors")

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.rows.append(len(inputs["x"]))
        self.clock.now += self.seconds
        return {"y": inputs["x"] * np.float32(self.factor)}


def test_golden_inputs_run_only_after_idle_time(tmp_path: Path) -> None:
    clock = Clock()
    model = Model(tmp_path, clock)
    golden = GoldenInputTest(model.info, model.run, clock)
    assert model.rows == [1]
    clock.now = EVERY - 0.1
    golden.run_if_due()
    golden.timer.restart()  # there was work
    clock.now = EVERY + 0.1
    golden.run_if_due()
    assert model.rows == [1]
    clock.now = 2 * EVERY
    golden.run_if_due()
    assert model.rows == [1, 1]


def test_slow_models_self_test_rarely(tmp_path: Path) -> None:
    clock = Clock()
    model = Model(tmp_path, clock, seconds=2.0)
    golden = GoldenInputTest(model.info, model.run, clock)
    clock.now = began = 100.0
    for _ in range(1000):
        clock.now += 1.0
        golden.run_if_due()
    spent = model.seconds * (len(model.rows) - 1)
    assert 0 < spent <= 1.1 * MOST_SHARE * (clock.now - began) + model.seconds


def test_changed_golden_output_raises(tmp_path: Path) -> None:
    clock = Clock()
    model = Model(tmp_path, clock)
    golden = GoldenInputTest(model.info, model.run, clock)
    model.factor, clock.now = 2.01, 10.0
    with pytest.raises(ArtifactError, match="output y on the golden inputs"):
        golden.run_if_due()


def test_model_without_golden_inputs_skips_the_self_test() -> None:
    clock = Clock()
    golden = GoldenInputTest(ModelInfo(name="m", inputs=INPUTS, outputs=OUTPUTS), dict, clock)
    clock.now = 100.0
    golden.run_if_due()


def test_outputs_match_within_rounding_only() -> None:
    known = np.array([1.0, np.nan, -3.0], np.float32)
    assert outputs_match(known + np.float32(1e-5), known)
    assert not outputs_match(known + np.float32(0.1), known)
    assert not outputs_match(np.zeros(3, np.float32), known)
    assert outputs_match(np.array([1, 2]), np.array([1, 2]))
    assert not outputs_match(np.array([1, 3]), np.array([1, 2]))


def test_outputs_match_nan_with_nan_only() -> None:
    known = np.array([np.nan, 1000.0, np.inf, 1e-3], np.float32)
    assert outputs_match(known.copy(), known)
    for place, value in ((0, 0.0), (1, np.inf), (2, -np.inf), (2, np.nan), (3, np.nan)):
        other = known.copy()
        other[place] = value
        assert not outputs_match(other, known)
    assert not outputs_match(known[:3], known)


class EngineThread:
    """Answers `tokens` when `answer` is called."""

    def __init__(self) -> None:
        self.tokens, self.running, self.asked = (5, 6), 0, list[tuple[Request, Any]]()

    def submit(self, request: Request, deliver: Any) -> None:
        self.asked.append((request, deliver))

    def answer(self) -> None:
        request, deliver = self.asked[-1]
        deliver([Output(id=request.id, index=0, token_ids=self.tokens, finish="length")])


def test_idle_language_model_generates_two_self_test_tokens() -> None:
    clock, engine_client = Clock(), EngineThread()
    golden = GoldenPromptTest(engine_client, clock)
    engine_client.running, clock.now = 1, 100.0
    golden.run_if_due()
    engine_client.running, clock.now = 0, 101.0
    golden.run_if_due()
    assert engine_client.asked == []
    clock.now += EVERY
    golden.run_if_due()
    golden.run_if_due()
    assert len(engine_client.asked) == 1
    engine_client.answer()
    golden.run_if_due()
    assert golden.answering
    assert len(engine_client.asked) == 1


def test_repeatedly_changed_tokens_end_the_worker() -> None:
    clock, engine_client = Clock(), EngineThread()
    golden = GoldenPromptTest(engine_client, clock)

    def turn() -> None:
        clock.now += 2 * EVERY
        golden.run_if_due()
        engine_client.answer()
        golden.run_if_due()

    turn()
    engine_client.tokens = (5, 7)
    for _ in range(MISSES - 1):
        turn()
    with pytest.raises(ArtifactError, match="other tokens"):
        turn()


def test_missing_self_test_tokens_make_it_unready_then_end_it() -> None:
    clock, engine_client = Clock(), EngineThread()
    golden = GoldenPromptTest(engine_client, clock)
    clock.now = 2 * EVERY
    golden.run_if_due()
    clock.now += PATIENCE + 1
    golden.run_if_due()
    assert not golden.answering
    clock.now += 2 * PATIENCE
    with pytest.raises(InferError, match="did not come"):
        golden.run_if_due()


def test_worker_with_changed_outputs_is_replaced_while_idle(tmp_path: Path) -> None:
    source = ModelSource(path=str(tmp_path), opener="tests.support.worker_models:decays", options={"good": 3})
    starting = StartingModel(source, restart=FAST)
    model = starting.wait_ready()

    async def go() -> None:
        async with engine_of(model) as engine:
            first = running_pid(model.replicas[0].pid)
            await asyncio.to_thread(wait_until, lambda: not alive(first))
            await asyncio.to_thread(wait_until, lambda: model.replicas[0].restarts.total >= 1)
            assert engine.failure is None

    asyncio.run(go())


def test_silent_worker_is_unready_until_its_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "SILENT_SECONDS", 2.0)

    async def go(model: Any) -> None:
        async with engine_of(model) as engine:
            await ask(engine, 1)
            pid = running_pid(model.replicas[0].pid)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.to_thread(wait_until, lambda: not engine.ready)
            assert engine.healthy
            os.kill(pid, signal.SIGCONT)
            await asyncio.to_thread(wait_until, lambda: engine.ready)
            assert model.replicas[0].pid == pid

    with remote() as model:
        asyncio.run(go(model))


def test_health_probe_runs_no_model() -> None:
    model = double()
    with live(model) as server:
        for path in ("/health", "/ready", "/v2/health/live", "/v2/health/ready", "/v2/models/double/ready"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
    assert model.batches == []


def test_readiness_names_the_model_with_a_silent_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(double()) as server:
        monkeypatch.setattr(TensorEngine, "ready", property(lambda engine: False))
        for path in ("/ready", "/v2/health/ready"):
            answer = httpx.get(f"{server.url}{path}")
            assert answer.status_code == 503
            assert "no worker of double is ready" in answer.text
