"""Admission control: predicted completion time, queue limits, priorities, and the latency models behind it."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from infer.errors import InferError, OverloadedError
from infer.serve.batching.infer_result import PendingResult
from infer.serve.batching.latency_model import LatencyModel
from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.http.request_context import RequestContext
from infer.serve.limits import ServeLimits
from infer.serve.llm.prompt_queue import ThroughputModel, WaitErrorModel
from infer.serve.observability.metrics import Metrics
from tests.support.fake_predictors import Live, double, live
from tests.support.manual_clock_queue import ManualClockQueue


def refused(clocked: ManualClockQueue, rows: int = 1, **how: Any) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        clocked.put(rows, **how)
    return caught.value


def test_no_request_is_refused_before_the_first_measurement() -> None:
    clocked = ManualClockQueue(max_queue_requests=10_000)
    for _ in range(5000):
        clocked.put(timeout=0.001)


def test_retry_after_is_the_predicted_time_of_the_queued_work() -> None:
    clocked = ManualClockQueue(max_batch=4, max_queue_requests=8)
    clocked.measured(0.1, 0.1)
    for _ in range(8):
        clocked.put()
    assert refused(clocked).retry_after == pytest.approx(1.0, rel=0.01)


def test_a_request_predicted_to_miss_its_deadline_is_refused_on_arrival() -> None:
    clocked = ManualClockQueue(max_batch=1, max_wait_seconds=9)
    clocked.measured(1.0, 0.0)
    for _ in range(3):
        clocked.put(timeout=3.2)
    error = refused(clocked, timeout=3.5)
    assert "predicted completion in 4.00 s exceeds the 3.50 s left to the request's deadline" in str(error)
    assert error.retry_after == pytest.approx(3.0)
    clocked.put(timeout=4.1)


def test_requests_within_limit_and_deadline_are_admitted_and_no_others() -> None:
    """Compare with the rule itself, which predicts every term, on random queues without overload."""
    random, decisions = np.random.default_rng(0), list[bool]()
    for _ in range(300):
        clocked = ManualClockQueue(max_batch=int(random.integers(1, 5)))
        clocked.measured(*random.choice([0.0, 0.01, 0.1], 2) + (0.0, 0.001))
        for _ in range(random.integers(0, 12)):
            with contextlib.suppress(OverloadedError):
                clocked.put(int(random.integers(1, 3)), key=str(random.integers(2)))
        clocked.queue.take()
        clocked.clock.now += random.choice([0.0, 0.05])
        queue, admission = clocked.queue, clocked.admission
        admission.pressure.clear()
        busy, left = admission._busy(), float(random.choice([0.1, 0.5, 1.0, 60]))
        everything, urgent = clocked.ahead(), clocked.ahead(2, clocked.clock.now + left)
        most = admission._bounds(busy, *everything)[1]
        in_time = admission._done(busy, *urgent, 1, 4) <= left
        expected = busy + admission._predict(*everything) <= most and in_time
        try:
            admission.check(2, clocked.clock.now + left, 1, 1, 16, 4)
        except OverloadedError:
            decisions.append(False)
        else:
            decisions.append(True)
        assert decisions[-1] == expected or not (queue.requests or queue.running)
    assert 0.2 < np.mean(decisions) < 0.8


def test_the_prediction_includes_the_requests_own_batch() -> None:
    clocked = ManualClockQueue(max_batch=8)
    clocked.measured(0.01, 0.01)
    clocked.queue.finished = clocked.clock.now
    refused(clocked, 8, timeout=0.08)
    clocked.put(1, timeout=0.08)


def test_long_rows_are_predicted_to_take_longer_than_short_ones() -> None:
    clocked = ManualClockQueue(max_batch=8)
    clocked.measured(0.0, 0.01)
    clocked.put(4, elements=400)
    assert clocked.wait() == pytest.approx(4.0, rel=0.01)


def test_items_of_different_keys_are_predicted_as_one_batch_each() -> None:
    clocked = ManualClockQueue(max_batch=8, max_wait_seconds=9)
    clocked.measured(0.1, 0.01)
    for key in "abcd":
        clocked.put(key=key)
    assert clocked.wait() == pytest.approx(4 * 0.1 + 4 * 0.01, rel=0.01)


def test_deadlines_are_checked_with_the_margin_of_uncertain_predictions() -> None:
    steady, shaky = ManualClockQueue(max_batch=4), ManualClockQueue(max_batch=4)
    for number in range(64):
        steady.latency.observe(16, 0.1)
        shaky.latency.observe(16, 0.06 if number % 2 else 0.14)
    for clocked in (steady, shaky):
        clocked.queue.finished = clocked.clock.now
    assert shaky.latency.seconds(16) == pytest.approx(0.1, rel=0.1)
    steady.put(4, timeout=0.12)
    refused(shaky, 4, timeout=0.12)
    shaky.put(4, timeout=0.3)


def test_a_late_running_batch_is_predicted_to_take_as_long_again() -> None:
    clocked = ManualClockQueue(max_batch=1)
    clocked.measured(1.0, 0.0)
    clocked.put()
    clocked.queue.take()
    assert clocked.wait() == pytest.approx(1.0)
    clocked.clock.now += 0.75
    assert clocked.wait() == pytest.approx(0.25)
    clocked.clock.now += 2.25
    assert clocked.wait() == pytest.approx(2.0)


def test_wait_is_until_the_first_free_executor_and_all_share_the_queue() -> None:
    clocked = ManualClockQueue(max_batch=1, num_executors=2, max_wait_seconds=9)
    clocked.measured(1.0, 0.0)
    clocked.put()
    clocked.queue.take(0)
    assert clocked.wait() == 0
    clocked.put()
    clocked.clock.now += 0.5
    clocked.queue.take(1)
    assert clocked.wait() == pytest.approx(0.5)
    clocked.put()
    clocked.put()
    assert clocked.wait() == pytest.approx(0.5 + 2 / 2)


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        pytest.param(0.001, 4000, id="a second of work"),
        pytest.param(0.8, 5, id="also of slower batches"),
        pytest.param(3.0, 4, id="but one batch at least"),
    ],
)
def test_one_second_of_work_may_wait_by_default(seconds: float, rows: int) -> None:
    clocked = ManualClockQueue(max_batch=4, max_queue_requests=10_000)
    clocked.measured(0.0, seconds / 4)
    for _ in range(rows + 1):
        clocked.put()
    assert "queue wait" in str(refused(clocked))


def crowd(clocked: ManualClockQueue, fixed: float, each: float) -> None:
    """Far more come than can be run; a batch takes `fixed` seconds and `each` for a row."""
    clocked.measured(fixed, each)
    for _ in range(60):
        seconds = fixed + each * sum(item.rows for item in clocked.queue.take().items)
        clocked.clock.now += seconds
        clocked.queue.finish(seconds)
        for _ in range(4 * clocked.queue.max_batch):
            with contextlib.suppress(OverloadedError):
                clocked.put()


def test_under_overload_only_two_batches_wait_until_the_queue_is_empty() -> None:
    clocked = ManualClockQueue(max_batch=4)
    clocked.measured(0.16, 0.01)
    while clocked.wait() <= 1:
        clocked.put()
    refused(clocked)
    assert not clocked.overloaded(), "one is not many"
    crowd(clocked, 0.16, 0.01)
    assert clocked.overloaded()
    assert 8 <= clocked.queue.rows <= 9
    for _ in range(15):
        while clocked.run(0.2):
            pass
        for _ in range(6):
            clocked.put()
    assert not clocked.overloaded()
    for _ in range(8):
        clocked.put()
    assert clocked.queue.rows == 14


def test_under_overload_two_batches_wait_besides_the_running_one() -> None:
    clocked = ManualClockQueue(max_batch=9)
    crowd(clocked, 0.018, 0.02)
    useful = clocked.latency.seconds(9 * 4)
    assert len(clocked.queue.take().items) == 9
    clocked.clock.now += useful / 2
    with contextlib.suppress(OverloadedError):
        for _ in range(100):
            clocked.put()
    assert 18 <= clocked.queue.rows < 40


def test_without_gain_from_batching_a_tenth_of_a_second_may_wait() -> None:
    clocked = ManualClockQueue(max_batch=32)
    crowd(clocked, 0.0, 0.01)
    assert 10 <= clocked.queue.rows <= 12


def test_admitted_requests_that_are_late_count_as_overload() -> None:
    patient, impatient = ManualClockQueue(max_batch=4), ManualClockQueue(max_batch=4)
    for clocked, timeout in ((patient, 0.9), (impatient, 0.01)):
        item = clocked.put(timeout=timeout)
        clocked.measured(0.16, 0.01)
        for _ in range(5):
            clocked.admission.note_expired(item)
    assert patient.overloaded()
    assert not impatient.overloaded()


def test_refused_short_deadlines_do_not_shorten_the_queue_of_others() -> None:
    clocked = ManualClockQueue(max_batch=4)
    clocked.measured(0.16, 0.01)
    for number in range(20):
        clocked.put()
        for _ in range(number):
            refused(clocked, timeout=0.1)
    assert not clocked.overloaded()


def test_a_request_of_the_next_batch_may_wait_for_the_running_one() -> None:
    clocked = ManualClockQueue(max_batch=4)
    clocked.measured(0.0, 1.0)
    clocked.put(4)
    clocked.queue.take()
    for _ in range(5):
        clocked.put()
    refused(clocked)


def test_max_wait_seconds_holds_for_every_deadline() -> None:
    clocked = ManualClockQueue(max_batch=1, max_wait_seconds=2)
    clocked.measured(1.0, 0.0)
    for _ in range(3):
        clocked.put()
    refused(clocked)


def test_an_urgent_request_does_not_wait_behind_less_urgent_ones() -> None:
    clocked = ManualClockQueue(max_batch=1, max_wait_seconds=1)
    clocked.measured(0.5, 0.0)
    for _ in range(3):
        clocked.put(priority=2)
    refused(clocked, priority=2)
    assert (clocked.wait(1), clocked.wait(2)) == (0, pytest.approx(1.5))
    urgent = clocked.put(priority=1, timeout=0.6)
    refused(clocked, priority=3)
    assert clocked.run(0.5) == [urgent]


def test_a_short_deadline_goes_first_and_counts_only_the_work_ahead_of_it() -> None:
    clocked = ManualClockQueue(max_batch=1)
    clocked.measured(0.3, 0.0)
    clocked.put()
    clocked.put()
    soon = clocked.put(timeout=0.5)
    refused(clocked, timeout=0.55)
    assert clocked.run(0.3) == [soon]


def test_cancelled_work_does_not_count_as_queue_wait() -> None:
    clocked = ManualClockQueue(max_batch=1)
    clocked.measured(1.0, 0.0)
    gone = [clocked.put(), clocked.put()]
    refused(clocked)
    for item in gone:
        clocked.queue.cancel(item)
    assert clocked.wait() == 0
    assert clocked.ahead() == (0, 0)
    clocked.put()


def test_a_batch_ends_where_its_first_request_would_be_late() -> None:
    clocked = ManualClockQueue(max_batch=8)
    clocked.measured(0.0, 0.01)
    items = [clocked.put(timeout=0.5 + number) for number in range(8)]
    clocked.clock.now += 0.455
    taken = clocked.queue.take()
    assert (taken.items, taken.reason) == (items[:4], "deadline")
    clocked.queue.finish(0.04)
    assert clocked.queue.take().items == items[4:]


def test_a_batch_ends_where_older_work_of_another_key_would_be_late() -> None:
    clocked = ManualClockQueue(max_batch=8)
    clocked.measured(0.0, 0.01)
    first, other = clocked.put(timeout=0.5), clocked.put(timeout=0.55, key="other")
    for _ in range(7):
        clocked.put(timeout=0.6)
    clocked.clock.now += 0.45
    taken = clocked.queue.take().items
    assert taken[0] is first
    assert len(taken) <= 5
    clocked.queue.finish(0.01 * len(taken))
    clocked.clock.now += 0.01 * len(taken)
    assert clocked.queue.take().items == [other]


def test_an_item_that_cannot_meet_its_deadline_is_dropped_before_it_runs() -> None:
    clocked = ManualClockQueue(max_batch=8)
    clocked.measured(0.0, 0.1)
    late, urgent = clocked.put(timeout=0.5), clocked.put(timeout=0.51, priority=1)
    others = [clocked.put(timeout=2.0) for _ in range(4)]
    clocked.clock.now += 0.45
    taken = clocked.queue.take()
    assert taken.expired == [urgent, late]
    assert taken.items == others


def test_a_late_item_alone_in_the_queue_runs_and_renews_the_measurement() -> None:
    clocked = ManualClockQueue(max_batch=8)
    clocked.measured(0.0, 0.1)
    late = clocked.put(timeout=0.5)
    clocked.clock.now += 0.45
    assert clocked.queue.take().items == [late]


def test_a_batch_does_not_grow_beyond_an_uncertain_deadline_of_its_item() -> None:
    clocked = ManualClockQueue(max_batch=8)
    for number in range(64):
        clocked.latency.observe(4 * (1 + number % 8), 0.01 * (1 + number % 8) * (1.2 if number % 3 else 0.6))
    first, *_ = [clocked.put(timeout=1.0), *(clocked.put(timeout=5.0) for _ in range(6))]
    clocked.clock.now += 1.0 - 1.3 * clocked.latency.seconds(4)
    assert clocked.latency.caution > 1.4
    assert clocked.queue.take().items == [first]


def test_all_waiting_items_of_other_keys_meet_their_deadlines() -> None:
    clocked = ManualClockQueue(max_batch=8)
    clocked.measured(0.0, 0.01)
    first = clocked.put(timeout=0.5)
    others = [clocked.put(timeout=0.53, key=key) for key in "abc"]
    for _ in range(7):
        clocked.put(timeout=0.6)
    clocked.clock.now += 0.47
    taken = clocked.queue.take().items
    assert taken[0] is first
    assert len(taken) <= 3
    clocked.clock.now += 0.01 * len(taken)
    clocked.queue.finish(0.01 * len(taken))
    assert [clocked.run(0.01) for _ in "abc"] == [[other] for other in others]
    assert clocked.clock.now <= 100.53


def test_more_urgent_work_joins_a_batch_although_others_wait() -> None:
    clocked = ManualClockQueue(max_batch=8)
    urgent = [clocked.put(timeout=0.5, priority=1) for _ in range(4)]
    clocked.put(timeout=0.03, key="other")
    clocked.measured(0.0, 0.01)
    assert clocked.queue.take().items == urgent


def test_a_less_urgent_request_joins_only_if_it_meets_its_deadline() -> None:
    clocked = ManualClockQueue(max_batch=8)
    patient, hasty = clocked.put(3, timeout=1.0, priority=1), clocked.put(timeout=0.03)
    clocked.measured(0.0, 0.01)
    assert clocked.queue.take().items == [patient]
    assert hasty.waiting


def test_under_overload_nearly_all_admitted_requests_meet_their_deadlines() -> None:
    """Three times the capacity, two lengths, batches that take 20 % more or less than expected: see `bench`."""
    random, clocked, allowed = np.random.default_rng(3), ManualClockQueue(max_batch=32), 0.4
    clocked.measured(0.013, 0.005)
    accepted, late, due, worked, wasted = 0, 0, 0.0, 0.0, 0.0
    while worked < 60:
        taken = clocked.queue.take()
        late += len(taken.expired)
        rows = sum(item.work for item in taken.items) / 4
        seconds = (0.013 + 0.005 * rows) * random.uniform(0.8, 1.2) if taken.items else 0.001
        until = clocked.clock.now + seconds
        while (due := due or clocked.clock.now + random.exponential(1 / 300)) < until:
            clocked.clock.now, due = due, 0.0
            with contextlib.suppress(OverloadedError):
                long = random.random() < 0.3
                clocked.put(timeout=allowed, key="long" if long else "short", elements=16 if long else 4)
                accepted += 1
        clocked.clock.now = until
        if taken.items:
            clocked.queue.finish(seconds)
            gone = [item for item in taken.items if item.deadline < until]
            late, worked, wasted = late + len(gone), worked + seconds, wasted + seconds * bool(gone)
    assert accepted > 60 * 80
    assert late < 0.02 * accepted
    assert wasted < 0.02 * worked


def test_one_slow_batch_causes_few_refusals() -> None:
    clocked = ManualClockQueue(max_batch=4)
    clocked.measured(0.01, 0.01)
    before = clocked.latency.seconds(16)
    clocked.latency.observe(16, 30.0)
    assert clocked.latency.seconds(16) < 1.3 * before
    for _ in range(4):
        clocked.latency.observe(16, before)
    assert clocked.latency.seconds(16) < 1.2 * before


@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_a_changed_latency_is_learned_after_three_batches(factor: float) -> None:
    clocked = ManualClockQueue(max_batch=4)
    clocked.measured(0.01, 0.01)
    for rows in (4, 2, 4):
        clocked.latency.observe(rows * 4, factor * (0.01 + 0.01 * rows))
    assert clocked.latency.seconds(16) == pytest.approx(factor * 0.05, rel=0.2)


def test_an_idle_model_with_a_stale_slow_measurement_is_tried_again() -> None:
    clocked = ManualClockQueue(max_batch=4)
    for _ in range(3):
        clocked.put()
        clocked.run(30.0)
    refused(clocked, timeout=5)
    clocked.clock.now += 1.0
    for _ in range(3):
        clocked.put(timeout=5)
        refused(clocked, timeout=5)
        clocked.run(0.01)
    assert clocked.latency.seconds(4) == pytest.approx(0.01)


def test_latency_model_learns_a_fixed_and_a_per_row_part() -> None:
    latency = LatencyModel()
    assert latency.seconds(8) == 0
    for rows in (1, 2, 4, 8, 3, 5, 7, 6):
        latency.observe(rows, 0.01 + 0.002 * rows)
    assert latency.seconds(8) == pytest.approx(0.026, rel=0.02)
    assert latency.seconds(1) == pytest.approx(0.012, rel=0.05)
    assert latency.seconds(24, 3) == pytest.approx(3 * 0.026, rel=0.03)


def test_the_warm_up_is_the_first_measurement() -> None:
    fake = double(max_batch=8)
    fake.warmup = lambda: [(4, 0.02), (32, 0.09)]  # type: ignore[method-assign, assignment, return-value]
    engine = TensorEngine(fake, ServeLimits(), Metrics("test").model("double", "1"))
    engine.warmup()
    assert engine.queue.latency.seconds(32) == pytest.approx(0.09)
    assert engine.queue.latency.seconds(4) == pytest.approx(0.02)


def test_throughput_model_survives_bursts_and_one_long_pause() -> None:
    rate = ThroughputModel()
    assert rate.seconds(100) == 0
    for _ in range(20):
        rate.observe(50, 0.2)
        rate.observe(50, 0.0)
    assert rate.seconds(1000) == pytest.approx(2.0, rel=0.1)
    rate.observe(50, 600.0)
    assert rate.seconds(1000) < 4.0


def test_waits_longer_than_predicted_increase_the_margin() -> None:
    foretold = WaitErrorModel()
    assert foretold.caution(1.0) == 0
    foretold.observe(0.0, 5.0)
    assert foretold.caution(1.0) == 0, "nothing was foretold"
    for _ in range(64):
        foretold.observe(1.0, 1.5)
    assert foretold.caution(1.0) == pytest.approx(1.5)
    assert foretold.caution(2.0) == pytest.approx(3.0)
    for _ in range(8):
        foretold.observe(0.001, 0.1)
    assert foretold.caution(1.0) == pytest.approx(1.5, rel=0.02), "short waits hardly count"
    for _ in range(200):
        foretold.observe(1.0, 1.0)
    assert foretold.caution(1.0) == pytest.approx(0.0, abs=0.01)


def test_short_and_long_waits_have_separate_error_margins() -> None:
    foretold = WaitErrorModel()
    for _ in range(32):
        foretold.observe(0.01, 0.02)
        foretold.observe(0.04, 0.05)
    assert foretold.caution(0.5) == pytest.approx(3 * 0.01, rel=0.1), "a step of 10 ms, however long the wait"
    assert foretold.caution(0.0) == 0, "who finds nobody waiting is let in"


def test_overtaken_prompts_meet_their_deadlines_too() -> None:
    foretold, waits = WaitErrorModel(), [0.4] * 19 + [2.4]
    for wait in waits * 20:
        foretold.observe(1.0, wait)
    assert foretold.caution(1.0) >= 1.4


MODEL = "/v2/models/double/infer"


@contextlib.contextmanager
def jammed() -> Iterator[Live]:
    """Serve a model that is busy, with a long measured latency, until its gate opens."""
    gate, entered = threading.Event(), threading.Event()
    fake = double(max_batch=1)
    double_it = fake.function

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        assert gate.wait(60)
        return double_it(inputs)

    fake.function = run
    with live(fake, limits=ServeLimits(max_wait_seconds=0.5)) as server:
        engine = server.service.engines["double"]
        engine.queue.latency.seed([(4, 100.0)])
        thread = threading.Thread(
            target=httpx.post, args=(server.url + MODEL,), kwargs={"json": body(), "timeout": 120}
        )
        thread.start()
        assert entered.wait(60)
        try:
            yield Live(**vars(server), engine=engine, gate=gate)
        finally:
            gate.set()
            thread.join()


def body(**parameters: Any) -> dict[str, Any]:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4}
    return {"inputs": [given], "parameters": parameters}


def rejections(server: Live) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    line = 'infer_rejected_total{model="double",reason="overloaded",version="1"} '
    return float(text.partition(line)[2].split("\n")[0])


def test_a_refusal_precedes_parsing_and_keeps_the_connection() -> None:
    with jammed() as server, socket.create_connection((server.host, server.port), timeout=10) as raw:
        nonsense = b"{" * 300_000
        head = f"POST {MODEL} HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: 1000\r\n"
        raw.sendall(f"{head}Content-Length: {len(nonsense)}\r\n\r\n".encode() + nonsense[:2000])
        status, headers, told = read(raw)
        assert (status, headers.get("connection")) == (503, None)
        assert "queue wait" in json.loads(told)["error"]
        assert int(headers["retry-after"]) == 60
        assert int(headers["retry-after-ms"]) == 60_000
        raw.sendall(nonsense[2000:])
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read(raw)[0] == 200
        assert rejections(server) == 1
        server.gate.set()
        payload = json.dumps(body()).encode()
        while server.engine.running:
            pass
        server.engine.queue.latency.seed([(4, 0.01)] * 3)
        raw.sendall(
            f"POST {MODEL} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload
        )
        assert read(raw)[0] == 200


def test_refused_requests_are_counted_once_each() -> None:
    with jammed() as server:
        for _ in range(3):
            assert httpx.post(server.url + MODEL, json=body()).status_code == 503
        assert rejections(server) == 3
        text = httpx.get(f"{server.url}/metrics").text
        assert 'infer_requests_total{api="kserve",code="503",model="double",version="1"} 3' in text


def test_refused_and_late_requests_are_freed_without_the_garbage_collector() -> None:
    """The collector would block the event loop while it frees hundreds of tracebacks."""
    kinds = RequestContext, InferError, PendingResult

    def there() -> int:
        return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())

    with jammed() as server, httpx.Client(base_url=server.url) as client:

        def ask(status: int, **parameters: Any) -> None:
            assert client.post(MODEL, json=body(**parameters)).status_code == status

        def all_kinds() -> None:
            ask(503)
            ask(503, priority=3)
            ask(400, priority="high")
            server.engine.queue.latency.batches, measured = 0, server.engine.queue.latency.batches
            ask(504, timeout=1000)
            server.engine.queue.latency.batches = measured

        all_kinds()
        all_kinds()  # by now every head is known
        gc.collect()
        gc.disable()
        rounds = 10
        try:
            before = (
                there()
            )  # a connection keeps its last request, and an answer is read before its request is let go
            for _ in range(rounds):
                all_kinds()
            until = time.monotonic() + 10
            while there() >= before + rounds and time.monotonic() < until:
                time.sleep(0.05)
            assert there() < before + rounds, "each round leaves something"
        finally:
            gc.enable()


def test_an_unknown_model_is_404_under_load_too() -> None:
    with jammed() as server:
        assert httpx.post(f"{server.url}/v2/models/triple/infer", json=body()).status_code == 404


def test_a_request_with_a_priority_is_read_before_admission() -> None:
    with jammed() as server:
        assert httpx.post(server.url + MODEL, json=body(priority=3)).status_code == 503
        bad = httpx.post(server.url + MODEL, content=b'{"priority": ')
        assert bad.status_code == 400


def read(raw: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        got = raw.recv(65536)
        assert got, data
        data += got
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    size = int(headers["content-length"])
    while len(rest) < size:
        rest += raw.recv(65536)
    return int(lines[0].split()[1]), headers, rest
