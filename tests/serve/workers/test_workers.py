"""Tensor models in worker processes: same outputs, and recovery from death, hang and exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.errors import ArtifactError, NotReadyError, PoisonError
from infer.process.error_messages import ChildError
from infer.serve.batching import batch_runner
from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.limits import ServeLimits
from infer.serve.observability.metrics import Metrics
from infer.serve.served_model import ServedModel
from infer.serve.workers.messages import ModelSource
from infer.serve.workers.model_loading import StartingModel
from infer.serve.workers.restart_policy import RestartLimitError, RestartLimits, RestartPolicy, WatchdogLimits
from tests.support.worker_models import DIE, HANG, RAISE, alive, running_pid, wait_until, x_of

pytestmark = pytest.mark.chaos
FAST = RestartLimits(first=0.01)


@contextlib.contextmanager
def remote(
    replicas: int = 1, watch: WatchdogLimits | None = None, opener: str = "FaultyModel", **options: Any
) -> Iterator[ServedModel]:
    source = ModelSource(path="faulty", opener=f"tests.support.worker_models:{opener}", options=options)
    starting = StartingModel(source, replicas, watch=watch, restart=FAST)
    with contextlib.closing(starting):
        yield starting.wait_ready()


@contextlib.asynccontextmanager
async def engine_of(model: ServedModel, **limits: Any) -> AsyncIterator[TensorEngine]:
    engine = TensorEngine(model, ServeLimits(**limits), Metrics("test").model(model.info.name, "1"))
    engine.start(asyncio.get_running_loop())
    try:
        yield engine
    finally:
        engine.stop(NotReadyError("over"))
        model.close()
        assert engine.join(10)


async def ask(engine: TensorEngine, *values: float, timeout: float = 60) -> Any:
    answer = await engine.infer(x_of(*values), timeout=timeout)
    np.testing.assert_array_equal(answer.outputs["y"], 2 * x_of(*values)["x"])
    return answer


def test_worker_outputs_equal_the_model_s() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            first = await ask(engine, 1)
            assert first.outputs["pid"][0] == model.replicas[0].pid != os.getpid()
            answers = await asyncio.gather(*(ask(engine, *range(i, i + 3)) for i in range(20)))
            assert max(answer.batch_size for answer in answers) > 3
            await ask(engine, *range(30))
            assert engine.ready

    with remote() as model:
        asyncio.run(go(model))


def test_event_loop_copies_small_batches_and_a_thread_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(model: ServedModel) -> None:
        (executor,) = model.replicas
        new, threads = executor.new, list[str]()

        def noted(*of: Any) -> Any:
            threads.append(threading.current_thread().name)
            return new(*of)

        monkeypatch.setattr(executor, "new", noted)
        async with engine_of(model) as engine:
            for size in (batch_runner.SMALL_BATCH, 0, batch_runner.SMALL_BATCH):
                monkeypatch.setattr(batch_runner, "SMALL_BATCH", size)
                await ask(engine, 1)
        assert threads == ["MainThread", f"infer-{model.info.name}-0", "MainThread"]

    with remote() as model:
        asyncio.run(go(model))


def test_retained_outputs_are_not_overwritten() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            kept = [await ask(engine, value) for value in range(20)]
        for value, answer in enumerate(kept):
            np.testing.assert_array_equal(answer.outputs["y"], 2 * x_of(value)["x"])

    with remote() as model:
        asyncio.run(go(model))


def test_raising_request_fails_alone_in_its_batch() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            values = [1, 2, RAISE, 4, 5, 6, 7]
            tasks = [engine.infer(x_of(value), timeout=60) for value in values]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(answers[2], ChildError)
            for value, answer in zip(values, answers, strict=True):
                if value != RAISE:
                    np.testing.assert_array_equal(answer.outputs["y"], 2 * x_of(value)["x"])
            assert engine.healthy
            assert model.replicas[0].restarts.total == 0

    with remote() as model:
        asyncio.run(go(model))


def test_request_that_kills_two_workers_is_quarantined_others_succeed() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            values = [1, 2, DIE, 4]
            tasks = [engine.infer(x_of(value), timeout=60) for value in values]
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(answers[2], PoisonError)
            for value, answer in zip(values, answers, strict=True):
                if value != DIE:
                    np.testing.assert_array_equal(answer.outputs["y"], 2 * x_of(value)["x"])
            deaths = model.replicas[0].restarts.total
            assert deaths == 2
            with pytest.raises(PoisonError):
                await engine.infer(x_of(DIE), timeout=60)
            await ask(engine, 7)
            assert model.replicas[0].restarts.total == deaths

    with remote() as model:
        asyncio.run(go(model))


def test_killed_worker_is_replaced_without_losing_requests() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            await ask(engine, 1)
            first = model.replicas[0].pid
            assert first is not None
            running = [asyncio.create_task(ask(engine, value)) for value in range(8)]
            while not engine.running:
                await asyncio.sleep(0.001)
            os.kill(first, signal.SIGKILL)
            for answer in await asyncio.gather(*running):
                assert answer.outputs["pid"][0] != first
            os.kill(running_pid(model.replicas[0].pid), signal.SIGKILL)  # while it has nothing to do
            await asyncio.to_thread(wait_until, lambda: model.replicas[0].restarts.total == 2)
            await asyncio.to_thread(wait_until, lambda: engine.ready)
            await ask(engine, 1)

    with remote(seconds=0.3) as model:
        asyncio.run(go(model))


@pytest.mark.parametrize(("tested", "warmups"), [(True, 1), (False, 2)])
def test_restarted_worker_skips_timing_after_passing_its_self_test(
    tmp_path: Path, tested: bool, warmups: int
) -> None:
    async def go(model: ServedModel) -> None:
        (executor,) = model.replicas
        async with engine_of(model) as engine:
            os.kill(first := running_pid(executor.pid), signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: executor.restarts.total == 1 and engine.ready)
            assert (await ask(engine, 1)).outputs["pid"][0] == executor.pid != first
        assert executor.opened is not None
        assert executor.opened.speeds == [(4, 0.5)]

    tally = tmp_path / "tally"
    with remote(opener="counts", tally=str(tally), tested=tested) as model:
        asyncio.run(go(model))
    assert len(tally.read_bytes()) == warmups


def test_hanging_worker_is_killed_busy_or_idle() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            await ask(engine, 1)
            first = running_pid(model.replicas[0].pid)
            os.kill(first, signal.SIGSTOP)
            await ask(engine, 2)
            assert not alive(first)
            second = running_pid(model.replicas[0].pid)
            os.kill(second, signal.SIGSTOP)  # and asked for nothing
            await asyncio.to_thread(wait_until, lambda: not alive(second))
            with pytest.raises(PoisonError):
                await engine.infer(x_of(HANG), timeout=60)
            assert model.replicas[0].restarts.total == 4

    with remote(watch=WatchdogLimits(batch=1.5, idle=2.5)) as model:
        asyncio.run(go(model))


def test_replicas_share_one_queue() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model, max_batch=1) as engine:
            answers = await asyncio.gather(*(ask(engine, value) for value in range(8)))
            assert len({int(answer.outputs["pid"][0]) for answer in answers}) == 2
            os.kill(running_pid(model.replicas[0].pid), signal.SIGKILL)
            await asyncio.gather(*(ask(engine, value) for value in range(8)))
            assert engine.ready

    with remote(replicas=2, seconds=0.1) as model:
        asyncio.run(go(model))


@pytest.mark.parametrize("opener", ["FaultyModel", "proven"])
def test_many_killing_requests_do_not_end_the_server(opener: str) -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            for value in range(4):
                if opener == "FaultyModel":  # it is known to answer only by what it answers
                    await ask(engine, value)
                with pytest.raises(PoisonError):
                    await engine.infer({"x": np.array([[DIE, value, value, value]], np.float32)}, timeout=60)
            assert model.replicas[0].restarts.total == 8
            await ask(engine, 1)
            assert engine.ready

    with remote(opener=opener) as model:
        asyncio.run(go(model))


@pytest.mark.parametrize("answers", [True, False])
def test_killed_worker_is_given_up_only_if_it_never_answers(answers: bool) -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            for _ in range(5):
                await asyncio.to_thread(wait_until, lambda: engine.ready)
                if answers:
                    await ask(engine, 1)
                os.kill(running_pid(model.replicas[0].pid), signal.SIGKILL)
                await asyncio.to_thread(wait_until, lambda: not engine.ready)
            if answers:
                await ask(engine, 2)
                return
            await asyncio.to_thread(wait_until, lambda: engine.failure is not None)
            assert isinstance(engine.failure, RestartLimitError)

    with remote(opener="proven") as model:
        asyncio.run(go(model))


def test_model_that_dies_of_every_request_is_given_up() -> None:
    async def go(model: ServedModel) -> None:
        async with engine_of(model) as engine:
            failed = []
            for value in range(3):
                try:
                    await engine.infer({"x": np.array([[DIE, value, value, value]], np.float32)}, timeout=60)
                except Exception as error:  # noqa: BLE001
                    failed.append(error)
            assert len(failed) == 3
            await asyncio.to_thread(wait_until, lambda: engine.failure is not None)
            assert isinstance(engine.failure, RestartLimitError)
            assert not engine.ready

    with remote() as model:
        asyncio.run(go(model))


def test_load_error_is_raised_and_leaves_no_process() -> None:
    starting = StartingModel(ModelSource(path="nowhere", opener="tests.support.worker_models:refuses"))
    pid = running_pid(starting._workers[0].pid)
    with pytest.raises(ArtifactError, match="a file is missing: weights - at nowhere. Copy it again"):
        starting.wait_ready()
    assert not alive(pid)
    starting = StartingModel(ModelSource(path="nowhere", opener="tests.support.worker_models:dies"))
    with pytest.raises(ArtifactError, match="exit code 7"):
        starting.wait_ready()


def test_worker_ends_with_its_server_and_leaks_no_descriptors() -> None:
    with remote() as model:
        pid = running_pid(model.replicas[0].pid)
        assert alive(pid)
    assert not alive(pid)
    before = len(os.listdir("/proc/self/fd"))
    with remote():
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_deaths_blamed_on_requests_do_not_count_after_answers() -> None:
    restarts = RestartPolicy(RestartLimits(), lambda: 0.0)
    for _ in range(6):
        restarts.record_success()
        assert restarts.record_death() is not None
        restarts.blame_request()  # it killed the worker once more, alone
        assert restarts.record_death() is not None
    restarts.record_self_test()
    assert restarts.record_death() is not None
    restarts.blame_request()
    assert restarts.record_death() is not None
    restarts.record_success()
    restarts.blame_request()  # another one that was there at the first of the two
    assert restarts.record_death() is not None
    assert [restarts.record_death() is None for _ in range(5)] == [False] * 4 + [True]


def test_deaths_without_any_answer_count() -> None:
    restarts = RestartPolicy(RestartLimits(), lambda: 0.0)
    given_up = []
    for _ in range(5):
        restarts.blame_request()
        given_up.append(restarts.record_death() is None)
    assert given_up == [False] * 4 + [True]


def test_restart_backoff_doubles_and_deaths_count_in_a_window() -> None:
    now = [0.0]
    restarts = RestartPolicy(RestartLimits(), lambda: now[0])
    assert [restarts.record_death() for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
    now[0] = 61.0
    assert restarts.record_death() == 1.6
    restarts.record_success()
    assert [restarts.record_death() for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert restarts.record_death() == 1.6  # the death after an answer did not count
    assert restarts.record_death() is None


def test_deaths_between_answers_never_count() -> None:
    restarts = RestartPolicy(RestartLimits(), lambda: 0.0)
    for _ in range(100):
        restarts.record_success()
        assert restarts.record_death() == 0.1


def test_worker_garbage_collection_skips_the_model(run_python) -> None:
    """Of torch alone there are so many objects that one of them would hold up a step for a third of a second."""
    code = """
import gc
from infer.serve.workers import __main__ as worker
from infer.serve.workers.messages import LoadModel, ModelSource
from infer.serve.workers.opening_progress import OpeningProgress
asked = LoadModel(ModelSource(path="x", opener="tests.support.worker_models:FaultyModel"))
model, _ = worker._open(asked, {}, OpeningProgress())
import numpy
assert model.run({"x": numpy.ones((1, 4), "float32")})
print(gc.isenabled(), gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 5_000)
"""
    assert run_python(code).strip() == "True True True"


def test_server_process_with_workers_imports_no_torch(run_python) -> None:
    code = """
import sys
import infer.cli.serve, infer.cli.options, infer.serve.server
import infer.serve.workers.remote_language_model
from infer import plugins
[plugins.get("infer.serve.api", name) for name in plugins.names("infer.serve.api")]
print("torch" in sys.modules)
"""
    assert run_python(code).strip() == "False"
