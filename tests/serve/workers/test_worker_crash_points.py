"""Worker death at each point of a request: a request without output is answered by the next worker."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer.errors import NotReadyError, PoisonError, WorkerDiedError
from infer.llm.engine.requests import Output, Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.process.channel import ClosedError
from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.limits import ServeLimits
from infer.serve.observability.metrics import Metrics
from infer.serve.workers.crash_retry import FailedOutput, RequestTable, RestartedOutput
from infer.serve.workers.messages import CancelRequest, EngineOutputs, EngineStatus, SubmitRequest
from infer.serve.workers.remote_engine import RemoteEngine
from infer.serve.workers.restart_policy import (
    MessageNotSentError,
    RestartLimitError,
    RestartLimits,
    RestartPolicy,
    WorkerLostError,
)
from tests.support.fake_predictors import double
from tests.support.worker_models import wait_until


class Wire:
    """The channel of one process. `refuses`: it is dead already, and sending to it fails."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.got, self.said = refuses, list[Any](), queue.SimpleQueue[Any]()

    def send(self, message: Any) -> None:
        if self.refuses:
            raise ClosedError("broken pipe")
        self.got.append(message)

    @property
    def requests(self) -> list[str]:
        return [message.request.id for message in self.got if isinstance(message, SubmitRequest)]

    def answer(self, id: str, **fields: Any) -> None:
        self.said.put(
            EngineOutputs([Output(id=id, index=0, **{"token_ids": (1,), "finish": "length", **fields})])
        )

    def die(self) -> None:
        self.said.put(WorkerLostError("signal SIGKILL"))


class Processes:
    """Fake `SupervisedWorker` that goes through given channels; `gate` delays a restart.

    `hopeless` makes the next restart fail for good.
    """

    def __init__(self, *wires: Wire) -> None:
        self._left = list(wires)
        self.wire, self.ready, self.closing = self._left.pop(0), True, False
        self.watch = SimpleNamespace(idle=30.0, batch=30.0)
        self.restarts = RestartPolicy(RestartLimits(first=0.0))
        self.channel_lock, self.gate, self.restarting = threading.Lock(), threading.Event(), threading.Event()
        self.gate.set()
        self.answering, self.pid, self.dead = True, 1, False
        self.wire.said.put(EngineStatus(0.0, {"steps": 0}))

    @property
    def channel(self) -> Wire:
        if self.dead:
            raise WorkerLostError("it is not running")
        return self.wire

    def receive(self, seconds: float | None, patience: float) -> Any:
        try:
            message = self.wire.said.get(timeout=0.02)
        except queue.Empty:
            return None
        if isinstance(message, WorkerLostError):
            self.ready, self.dead = False, True
            raise message
        return message

    def restart(self, stopping: Callable[[], bool]) -> None:
        self.restarting.set()
        assert self.gate.wait(20)
        if not self._left:
            raise RestartLimitError("died too often")
        self.wire = self._left.pop(0)
        self.ready, self.dead = True, False

    def close(self) -> None:
        self.closing = True


class ReceivedOutputs(list[Output]):
    """Outputs that one request received."""

    @property
    def finish(self) -> str | None:
        return self[-1].finish if self else None

    @property
    def error(self) -> Exception | None:
        return next((one.error for one in self if isinstance(one, FailedOutput)), None)


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[RemoteEngine, Processes, list[Wire]]]]:
    drivers = []

    def make(*wires: Wire) -> tuple[RemoteEngine, Processes, list[Wire]]:
        processes = Processes(*wires)
        drivers.append(RemoteEngine(processes, name="fake"))  # type: ignore[arg-type]
        return drivers[-1], processes, list(wires)

    yield make
    for engine_client in drivers:
        engine_client.worker.gate.set()  # type: ignore[attr-defined]
        engine_client.close()


def ask(engine_client: RemoteEngine, id: str, *, stream: bool = False) -> ReceivedOutputs:
    collected = ReceivedOutputs()
    request = Request(id=id, prompt=[sum(id.encode())], sampling=Sampling(max_tokens=3))
    engine_client.submit(request, collected.extend, replay=not stream)
    return collected


def test_unsent_request_counts_no_worker_death(made: Any) -> None:
    dead, again, last = Wire(refuses=True), Wire(refuses=True), Wire()
    engine_client, _, _ = made(dead, again, last)
    collected = [ask(engine_client, "a"), ask(engine_client, "b")]
    for wire in (dead, again):  # two deaths, and neither process had them
        wait_until(lambda w=wire: engine_client.worker.wire is w)
        wire.die()
    wait_until(lambda: last.requests == ["a", "b"])
    last.answer("a")
    last.answer("b")
    wait_until(lambda: all(one.finish == "length" for one in collected))


@pytest.mark.parametrize("stream", [False, True])
def test_sent_request_is_resent_after_worker_death(made: Any, stream: bool) -> None:
    engine_client, _, (first, second) = made(Wire(), Wire())
    collected = ask(engine_client, "a", stream=stream)
    wait_until(lambda: first.requests == ["a"])
    first.die()
    wait_until(lambda: second.requests == ["a"])
    second.answer("a")
    wait_until(lambda: collected.finish == "length")


def test_death_after_some_tokens_restarts_unstreamed_requests(made: Any) -> None:
    engine_client, _, (first, second) = made(Wire(), Wire())
    whole, stream = ask(engine_client, "a"), ask(engine_client, "b", stream=True)
    wait_until(lambda: first.requests == ["a", "b"])
    for id in "ab":
        first.answer(id, finish=None)
    wait_until(lambda: bool(whole) and bool(stream))
    first.die()
    wait_until(lambda: second.requests == ["a"])
    second.answer("a")
    wait_until(lambda: whole.finish == "length")
    assert isinstance(whole[1], RestartedOutput)
    assert isinstance(stream.error, WorkerDiedError)


def test_requests_during_restart_reach_the_next_worker_once(made: Any) -> None:
    engine_client, processes, (first, second) = made(Wire(), Wire())
    before = ask(engine_client, "a")
    wait_until(lambda: first.requests == ["a"])
    processes.gate.clear()
    first.die()
    assert processes.restarting.wait(20)
    during = [ask(engine_client, id) for id in "bcd"]
    assert not second.requests
    processes.gate.set()
    wait_until(lambda: second.requests == ["a"])  # who was there is tried alone
    second.answer("a")
    wait_until(lambda: second.requests == ["a", "b", "c", "d"])
    for id in "bcd":
        second.answer(id)
    wait_until(lambda: all(one.finish == "length" for one in [before, *during]))


def test_messages_for_a_dead_worker_never_reach_the_next(made: Any) -> None:
    engine_client, processes, (first, second) = made(Wire(), Wire())
    collected = ask(engine_client, "a")
    wait_until(lambda: first.requests == ["a"])
    processes.gate.clear()
    first.die()
    assert processes.restarting.wait(20)
    engine_client.cancel("a")
    processes.gate.set()
    wait_until(lambda: processes.ready)
    after = ask(engine_client, "b")
    wait_until(lambda: second.requests == ["b"])
    assert not [message for message in second.got if isinstance(message, CancelRequest)]
    second.answer("b")
    wait_until(lambda: after.finish == "length")
    assert not collected


def test_request_written_before_two_deaths_is_refused(made: Any) -> None:
    engine_client, _, (first, second, third) = made(Wire(), Wire(), Wire())
    collected, other = ask(engine_client, "a"), ask(engine_client, "b")
    wait_until(lambda: first.requests == ["a", "b"])
    first.die()
    wait_until(lambda: second.requests == ["a"])
    second.die()
    wait_until(lambda: third.requests == ["b"])
    third.answer("b")
    wait_until(lambda: other.finish == "length")
    assert isinstance(collected.error, PoisonError)


def test_giving_up_the_worker_fails_waiting_requests_with_503(made: Any) -> None:
    engine_client, _, (first,) = made(Wire())
    collected = ask(engine_client, "a")
    wait_until(lambda: first.requests == ["a"])
    first.die()
    wait_until(lambda: collected.finish == "error")
    assert isinstance(collected.error, NotReadyError)
    with pytest.raises(NotReadyError):
        ask(engine_client, "b")


def test_request_table_is_closed_between_two_workers() -> None:
    table = RequestTable()
    table.add(Request(id="a", prompt=[1]), lambda outputs: None)
    table.on_worker_death()
    assert table.take_pending()[1] == []
    table.on_worker_restart()
    epoch, requests = table.take_pending()
    assert [request.id for request in requests] == ["a"]
    table.on_worker_death()
    table.mark_written("a", epoch)  # too late: of the process before
    table.on_worker_restart()
    later, requests = table.take_pending()
    assert (later, [request.id for request in requests]) == (epoch + 1, ["a"])


class Refusing:
    """An executor whose first three workers are dead before a batch can be sent."""

    watched, pid, began = True, 1, 0.0

    def __init__(self) -> None:
        self.begun, self.outputs = list[int](), dict[str, Any]()
        self.reads, self.writes = os.pipe()

    def fileno(self) -> int:
        return self.reads

    def new(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def begin(self, inputs: dict[str, Any]) -> None:
        self.begun.append(len(inputs["x"]))
        if len(self.begun) < 4:
            raise ClosedError("broken pipe")
        self.outputs = {"y": 2 * inputs["x"]}
        os.write(self.writes, b"!")

    def poll(self) -> tuple[dict[str, Any], float]:
        os.read(self.reads, 1)
        return self.outputs, 0.0

    def not_sent(self) -> MessageNotSentError:
        return MessageNotSentError("signal SIGKILL")

    def restart(self, stopping: Any) -> None:
        pass


def test_unsent_batch_runs_in_full_on_the_next_worker() -> None:
    executor, fake = Refusing(), double()
    fake.replicas = [executor]  # type: ignore[list-item]
    engine = TensorEngine(fake, ServeLimits(), Metrics("test").model("double", "1"))

    async def main() -> None:
        engine.start(asyncio.get_running_loop())
        rows = [np.full((1, 4), value, np.float32) for value in range(5)]
        answers = await asyncio.gather(*(engine.infer({"x": row}, timeout=9) for row in rows))
        for row, answer in zip(rows, answers, strict=True):
            np.testing.assert_array_equal(answer.outputs["y"], 2 * row)
        engine.stop(NotReadyError("over"))

    asyncio.run(main())
    assert engine.join(5)
    assert executor.begun == [5, 5, 5, 5]
