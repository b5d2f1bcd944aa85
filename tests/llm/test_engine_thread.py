"""The engine thread: one call per step, every request ends, the engine's death is everybody's error and kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from infer.errors import InputError, NotReadyError, OverloadedError
from infer.llm.engine.engine_thread import EngineThread
from infer.llm.engine.requests import Output, Request
from infer.llm.engine.sampling.sampling_options import Sampling

pytestmark = pytest.mark.filterwarnings("error")


class Echo:
    """An engine that gives each request its prompt back, one token a step; `gate` lets steps through."""

    def __init__(self) -> None:
        self.left: dict[str, list[int]] = {}
        self.n: dict[str, int] = {}
        self.cancelled: list[str] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.broken: Exception | None = None

    @property
    def idle(self) -> bool:
        return not self.left

    def check(self, request: Request) -> None:
        if not request.prompt:
            raise InputError("the prompt is empty", where="prompt")
        if len(self.left) > 100:
            raise OverloadedError("the queue is full")

    def begin(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        if request.prompt == [666]:
            raise InputError("not this one")
        self.left[request.id], self.n[request.id] = list(request.prompt), request.sampling.n

    def cancel(self, id: str) -> None:
        self.left.pop(id, None)
        self.cancelled.append(id)

    def step(self) -> list[Output]:
        self.threads.add(threading.get_ident())
        self.gate.wait(10)
        if self.broken:
            raise self.broken
        outputs = []
        for id, tokens in list(self.left.items()):
            token = tokens.pop(0)
            finish = None if tokens else "stop"
            outputs += [
                Output(id=id, index=i, token_ids=(token,), text=str(token), finish=finish)
                for i in range(self.n[id])
            ]
            if finish:
                del self.left[id]
        return outputs

    def stats(self) -> int:
        return len(self.left)


class Box:
    """Keeps what it is given; `wait` until `count` completions ended."""

    def __init__(self) -> None:
        self.calls: list[list[Output]] = []
        self.changed = threading.Condition()

    def put(self, outputs: list[Output]) -> None:
        with self.changed:
            self.calls.append(outputs)
            self.changed.notify_all()

    @property
    def all(self) -> list[Output]:
        return [output for call in self.calls for output in call]

    def wait(self, count: int = 1) -> list[Output]:
        with self.changed:
            assert self.changed.wait_for(lambda: sum(o.finish is not None for o in self.all) >= count, 10)
        return self.all


@pytest.fixture
def engine() -> Echo:
    return Echo()


@pytest.fixture
def engine_client(engine: Echo) -> Iterator[EngineThread]:
    made = EngineThread(engine)
    yield made
    engine.gate.set()
    made.close()
    assert not made._thread.is_alive()


def request(id: str, *prompt: int, n: int = 1) -> Request:
    return Request(id=id, prompt=list(prompt), sampling=Sampling(n=n))


def test_a_request_gets_its_tokens_in_order(engine_client: EngineThread) -> None:
    box = Box()
    engine_client.submit(request("a", 3, 1, 2), box.put)
    assert [o.token_ids for o in box.wait()] == [(3,), (1,), (2,)]
    assert engine_client.running == 0


def test_outputs_of_one_step_come_in_one_call(engine_client: EngineThread, engine: Echo) -> None:
    box = Box()
    engine.gate.clear()
    engine_client.submit(request("first", 9), box.put)
    for name in "abc":
        engine_client.submit(request(name, 1, 2), box.put)
    engine.gate.set()
    box.wait(4)
    calls = [sorted(o.id for o in call) for call in box.calls]
    assert [set("abc") <= set(call) for call in calls if "a" in call] == [True, True]
    assert all(len(set(call)) == len(call) for call in calls)


def test_each_callback_gets_outputs_of_its_request_only(engine_client: EngineThread) -> None:
    boxes = {name: Box() for name in "abcdef"}
    for name, box in boxes.items():
        engine_client.submit(request(name, 1, 2, 3), box.put)
    for name, box in boxes.items():
        assert {o.id for o in box.wait()} == {name}


def test_the_engine_is_used_by_one_thread_only(engine_client: EngineThread, engine: Echo) -> None:
    box = Box()

    def many(name: str) -> None:
        for i in range(20):
            engine_client.submit(request(f"{name}{i}", 1, 2), box.put)

    threads = [threading.Thread(target=many, args=(name,)) for name in "abcd"]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(box.wait(80)) == 160
    assert len(engine.threads) == 1


def test_a_cancelled_request_ends_once_and_the_others_go_on(
    engine_client: EngineThread, engine: Echo
) -> None:
    box, other = Box(), Box()
    engine.gate.clear()
    engine_client.submit(request("a", *range(1000), n=2), box.put)
    engine_client.submit(request("b", 1, 2), other.put)
    engine_client.cancel("a")
    engine_client.cancel("a")
    engine.gate.set()
    ends = [(o.index, o.finish) for o in box.wait(2) if o.finish]
    assert ends == [(0, "cancelled"), (1, "cancelled")]
    assert other.wait()[-1].finish == "stop"
    engine_client.cancel("a")
    engine_client.cancel("never heard of")
    assert engine_client.drain(5)
    assert "a" in engine.cancelled


def test_submit_raises_for_an_invalid_request(engine_client: EngineThread) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        engine_client.submit(request("a"), lambda outputs: None)
    assert engine_client.running == 0


def test_an_error_found_by_the_engine_ends_the_request(engine_client: EngineThread) -> None:
    box = Box()
    engine_client.submit(request("a", 666), box.put)
    (output,) = box.wait()
    assert (output.finish, output.stopped_by) == ("error", "not this one")
    assert engine_client.failure is None


def test_of_requests_that_came_together_each_ends_once(engine_client: EngineThread, engine: Echo) -> None:
    box = Box()
    engine.gate.clear()
    for i in range(10):
        engine_client.submit(request(str(i), i, i), box.put)
    engine_client.cancel("7")
    engine.gate.set()
    ends = {o.id: o.finish for o in box.wait(10) if o.finish}
    assert ends == {**{str(i): "stop" for i in range(10)}, "7": "cancelled"}


def test_the_id_of_a_running_request_cannot_be_reused(engine_client: EngineThread, engine: Echo) -> None:
    engine.gate.clear()
    box = Box()
    engine_client.submit(request("a", 1), box.put)
    with pytest.raises(InputError, match="a request named 'a' is running"):
        engine_client.submit(request("a", 1), box.put)
    engine.gate.set()
    box.wait()
    engine_client.submit(request("a", 1), box.put)
    box.wait(2)


def test_a_failure_of_the_engine_ends_all_requests_and_is_kept(
    engine_client: EngineThread, engine: Echo
) -> None:
    boxes = [Box(), Box()]
    engine.gate.clear()
    for i, box in enumerate(boxes):
        engine_client.submit(request(str(i), 1, 2, 3), box.put)
    engine.broken = RuntimeError("out of luck")
    engine.gate.set()
    for box in boxes:
        output = box.wait()[-1]
        assert (output.finish, output.stopped_by) == ("error", "the engine died: RuntimeError: out of luck")
    assert engine_client.failure is engine.broken
    with pytest.raises(NotReadyError, match="the engine died: out of luck"):
        engine_client.submit(request("z", 1), boxes[0].put)
    assert engine_client.drain(1)


def test_a_callback_that_raises_ends_its_own_request_only(engine_client: EngineThread, engine: Echo) -> None:
    def broken(outputs: list[Output]) -> None:
        raise ValueError("not my day")

    box = Box()
    engine_client.submit(request("bad", *range(1000)), broken)
    engine_client.submit(request("good", 1, 2), box.put)
    assert box.wait()[-1].finish == "stop"
    assert engine_client.drain(5)
    assert engine_client.failure is None
    assert engine.cancelled == ["bad"]


def test_a_reserved_request_runs_once_it_is_admitted(engine_client: EngineThread) -> None:
    box = Box()
    submission = engine_client.reserve(request("a", 1, 2), box.put)
    with pytest.raises(InputError, match="a request named 'a' is running"):
        engine_client.submit(request("a", 1), box.put)
    assert not engine_client.drain(0)
    engine_client.admit(submission)
    assert [o.token_ids for o in box.wait()] == [(1,), (2,)]
    assert not engine_client.withdraw(submission)


def test_a_reserved_request_can_be_cancelled_or_withdrawn(engine_client: EngineThread, engine: Echo) -> None:
    cancelled, withdrawn = Box(), Box()
    submission = engine_client.reserve(request("a", 1, 2), cancelled.put)
    engine_client.cancel("a")
    assert cancelled.wait()[-1].finish == "cancelled"
    engine_client.admit(submission)
    assert not engine_client.withdraw(submission)
    assert engine_client.withdraw(engine_client.reserve(request("b", 1), withdrawn.put))
    assert engine_client.drain(5)
    assert (len(cancelled.all), withdrawn.all, engine.left) == (1, [], {})


def test_draining_finishes_submitted_requests_and_refuses_new_ones(
    engine_client: EngineThread, engine: Echo
) -> None:
    box = Box()
    engine.gate.clear()
    engine_client.submit(request("a", 1, 2), box.put)
    assert not engine_client.drain(0.01)
    with pytest.raises(NotReadyError, match="stopping"):
        engine_client.submit(request("b", 1), box.put)
    engine.gate.set()
    assert engine_client.drain(10)
    assert box.all[-1].finish == "stop"


def test_closing_cancels_running_requests(engine: Echo) -> None:
    engine_client, box = EngineThread(engine), Box()
    engine_client.submit(request("a", *range(100_000)), box.put)
    engine_client.close()
    engine_client.close()
    assert box.wait()[-1].finish == "cancelled"
    assert engine.cancelled == ["a"]
    with pytest.raises(NotReadyError):
        engine_client.submit(request("b", 1), box.put)


def test_an_idle_engine_thread_keeps_its_heartbeat(engine_client: EngineThread) -> None:
    steps, beat = engine_client.steps, engine_client.beat
    deadline = time.monotonic() + 5
    while engine_client.beat == beat and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine_client.beat > beat
    assert engine_client.steps - steps <= 1
    assert engine_client.stats() == 0
