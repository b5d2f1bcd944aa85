"""Batch queue, collation and tensor engine, with a manual clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer.artifact.model_info import ModelInfo
from infer.errors import DeadlineError, InferError, InputError, NotReadyError, OverloadedError, TooLargeError
from infer.serve.batching.collate import Collator, length_bucket
from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.batching.text_inputs import infer_rows
from infer.serve.limits import ServeLimits
from infer.serve.observability.metrics import Metrics
from infer.serve.served_model import ServedModel, run_arrays
from infer.spec import TensorSpec
from tests.support.fake_predictors import double, embedder
from tests.support.manual_clock_queue import ManualClockQueue


def test_an_empty_queue_gives_no_batch_and_no_delay() -> None:
    taken = ManualClockQueue().queue.take()
    assert (taken.items, taken.expired, taken.wait) == ([], [], None)


def test_a_free_executor_takes_waiting_items_at_once() -> None:
    clocked = ManualClockQueue()
    items = [clocked.put(), clocked.put()]
    taken = clocked.queue.take()
    assert taken.items == items
    assert taken.reason == "idle"
    assert clocked.queue.requests == clocked.queue.rows == clocked.queue.bytes == 0


def test_a_batch_holds_at_most_max_batch_rows() -> None:
    clocked = ManualClockQueue(max_batch=4)
    a, b, c = clocked.put(2), clocked.put(2), clocked.put(1)
    taken = clocked.queue.take()
    assert taken.items == [a, b]
    assert taken.reason == "full"
    assert clocked.queue.take().items == [c]


def test_an_item_that_does_not_fit_is_first_of_the_next_batch() -> None:
    clocked = ManualClockQueue(max_batch=4)
    a, big, small = clocked.put(2), clocked.put(3), clocked.put(2)
    assert clocked.queue.take().items == [a, small]
    assert clocked.queue.take().items == [big]


def test_keys_never_share_a_batch_and_the_oldest_deadline_goes_first() -> None:
    clocked = ManualClockQueue()
    late, soon, late2 = (
        clocked.put(key="a", timeout=9),
        clocked.put(key="b", timeout=3),
        clocked.put(key="a", timeout=9),
    )
    assert clocked.queue.take().items == [soon]
    assert clocked.queue.take().items == [late, late2]


def test_priority_goes_before_deadline() -> None:
    clocked = ManualClockQueue(max_batch=1)
    normal, urgent = clocked.put(timeout=1), clocked.put(timeout=50, priority=1)
    assert clocked.queue.take().items == [urgent]
    assert clocked.queue.take().items == [normal]


def test_a_batch_is_bounded_in_elements_with_padding() -> None:
    clocked = ManualClockQueue(max_batch=4, max_batch_elements=20)
    short, long = clocked.put(elements=4), clocked.put(elements=10)
    assert clocked.queue.take().items == [short, long]
    a, _, _ = clocked.put(elements=10), clocked.put(elements=4), clocked.put(elements=4)
    assert len(clocked.queue.take().items) == 2
    assert a.waiting is False
    with pytest.raises(TooLargeError):
        clocked.put(elements=21)


def test_an_expired_item_is_reported_and_in_no_batch() -> None:
    clocked = ManualClockQueue()
    dead, alive = clocked.put(timeout=1), clocked.put(timeout=9)
    clocked.clock.now += 2
    taken = clocked.queue.take()
    assert (taken.items, taken.expired) == ([alive], [dead])


def test_a_cancelled_item_frees_its_place_in_the_queue() -> None:
    clocked = ManualClockQueue()
    gone, stays = clocked.put(3), clocked.put()
    assert clocked.queue.cancel(gone)
    assert clocked.queue.rows == 1
    assert clocked.queue.take().items == [stays]
    assert not clocked.queue.cancel(stays), "what runs can't be cancelled any more"


def test_ten_thousand_cancelled_items_leave_no_heap_entries() -> None:
    clocked = ManualClockQueue()
    for waiting in (0, 1):
        for _ in range(10_000):
            clocked.queue.cancel(clocked.put())
        assert sum(len(heap) for heap in clocked.queue.tenant("").heaps.values()) <= 66 * waiting
        clocked.put()


@pytest.mark.parametrize(
    ("limits", "rows"),
    [({"max_queue_requests": 2}, 1), ({"max_queue_rows": 5}, 2), ({"max_queue_bytes": 40}, 1)],
)
def test_a_full_queue_refuses_and_admits_again_when_there_is_room(limits: dict[str, int], rows: int) -> None:
    clocked = ManualClockQueue(**limits)
    clocked.put(rows)
    clocked.put(rows)
    with pytest.raises(OverloadedError):
        clocked.put(rows)
    assert clocked.queue.requests == 2
    clocked.queue.take()
    clocked.put(rows)


def test_a_request_larger_than_the_queue_is_too_large_not_overload() -> None:
    with pytest.raises(TooLargeError, match="5 rows"):
        ManualClockQueue(max_queue_rows=5).put(6)


def test_draining_refuses_new_work_and_finishes_old() -> None:
    clocked = ManualClockQueue()
    item = clocked.put()
    clocked.queue.draining = True
    with pytest.raises(NotReadyError):
        clocked.put()
    assert clocked.queue.take().items == [item]


def test_max_delay_delays_a_partial_batch_but_not_a_full_one() -> None:
    clocked = ManualClockQueue(max_batch=2, max_delay_us=10_000)
    first = clocked.put()
    assert clocked.queue.take().wait == pytest.approx(0.01)
    clocked.clock.now += 0.004
    assert clocked.queue.take().wait == pytest.approx(0.006)
    second = clocked.put()
    assert clocked.queue.take().items == [first, second]
    alone = clocked.put()
    clocked.clock.now += 0.011
    assert clocked.queue.take().items == [alone]


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 24, 25, 63, 64, 100, 500])
def test_buckets_hold_their_lengths_with_less_than_a_third_of_padding(rows: int) -> None:
    assert length_bucket(rows) >= rows
    assert rows <= 16 or rows > length_bucket(rows) * 2 / 3


def test_collator_pads_ragged_rows_and_cuts_outputs_back() -> None:
    fake = embedder()
    fake.change(outputs=(*fake.info.outputs, TensorSpec("ids", "int64", ("batch", "seq"))))
    layout = Collator(fake.info)
    assert layout.ragged == {"seq"}
    parts = [fake.tokenize(["abc"]), fake.tokenize(["a", "ab"])]
    joined, padding = layout.collate(parts)
    assert joined["input_ids"].shape == (3, 4)
    assert joined["attention_mask"].sum(1).tolist() == [4, 2, 3]
    assert padding == pytest.approx(2 / 12)
    sizes = [layout.check(part) for part in parts]
    pieces = layout.split_outputs({"ids": joined["input_ids"]}, sizes)
    assert [piece["ids"].shape for piece in pieces] == [(1, 4), (2, 3)]
    assert (pieces[1]["ids"] == parts[1]["input_ids"]).all()


def test_collator_does_not_pad_a_model_without_padding_values() -> None:
    fake = embedder()
    fake.change(padding={"input_ids": 0})
    layout = Collator(fake.info)
    assert not layout.ragged
    assert layout.key({"batch": 1, "seq": 3}) != layout.key({"batch": 1, "seq": 4})


def test_collator_runs_models_without_a_batch_dimension_one_by_one() -> None:
    spec = TensorSpec("x", "float32", (4,))
    layout = Collator(ModelInfo(name="one", inputs=(spec,), outputs=(spec,), max_batch=8))
    assert (layout.batched, layout.max_batch) == (False, 1)


def test_collator_refuses_outputs_with_another_number_of_rows() -> None:
    with pytest.raises(InferError, match="rows of output"):
        Collator(double().info).split_outputs({"y": np.zeros((2, 4))}, [{"batch": 3}])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "missing input 'x' float32"),
        ({"x": np.zeros((1, 4), np.float32), "z": np.zeros(1)}, "no input named 'z'"),
        (
            {"x": np.zeros((1, 5), np.float32)},
            r"expected input 'x' float32 \[batch, 4\], got float32 \[1, 5\]",
        ),
        ({"x": np.zeros((1, 4), np.float64)}, "got float64"),
        ({"x": np.zeros((0, 4), np.float32)}, "expected batch between 1 and 8, got 0"),
    ],
)
def test_collator_errors_name_the_mismatch(arrays: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Collator(double().info).check(arrays)


def x(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[value] * 4 for value in values], np.float32)}


def with_engine(
    model: ServedModel, story: Callable[[TensorEngine], Awaitable[None]], **limits: Any
) -> TensorEngine:
    engine = TensorEngine(model, ServeLimits(**limits), Metrics("test").model(model.info.name, "1"))

    async def main() -> None:
        engine.start(asyncio.get_running_loop())
        try:
            await story(engine)
        finally:
            engine.stop(NotReadyError("over"))

    asyncio.run(main())
    assert engine.join(5)
    return engine


class Gate:
    """A model that runs when it is let."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.model = double()
        self.model.function = self.run

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.entered.set()
        assert self.open.wait(5)
        if (inputs["x"] == 666).any():
            raise ValueError("poison")
        return {"y": inputs["x"] * 2}

    async def occupied(self, engine: TensorEngine) -> asyncio.Task[Any]:
        """Wait until the engine is inside its first batch."""
        task = asyncio.create_task(engine.infer(x(0), timeout=9))
        await asyncio.get_running_loop().run_in_executor(None, self.entered.wait, 5)
        return task


@pytest.mark.parametrize(
    ("joins", "batches"), [("padded", [4]), ("equal", [1, 1, 2]), ("none", [1, 1, 1, 1])]
)
def test_texts_run_together_as_far_as_answers_stay_the_same(joins: str, batches: list[int]) -> None:
    fake, texts = embedder(), ["a", "bbb", "cc", "ddd"]

    def seen(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows, width = inputs["input_ids"].shape
        sums = inputs["input_ids"].sum(1)
        return {
            "embedding": np.stack([sums, np.full(rows, width), np.full(rows, rows)], 1).astype(np.float32)
        }

    fake.function = seen
    fake.change(joins=joins)

    async def story(engine: TensorEngine) -> None:
        found = (await infer_rows(engine, fake.tokenize(texts), timeout=9)).outputs["embedding"]
        alone = [seen(fake.tokenize([text]))["embedding"][0] for text in texts]
        assert found[:, 0].tolist() == [one[0] for one in alone], "answers come in the order of the texts"
        if joins != "padded":
            assert found[:, 1].tolist() == [one[1] for one in alone], "no text is padded"

    with_engine(fake, story)
    assert sorted(fake.batches) == batches


def test_outputs_of_texts_that_ran_apart_get_one_width() -> None:
    fake = embedder()
    fake.function = lambda inputs: {"ids": inputs["input_ids"]}
    fake.change(outputs=(TensorSpec("ids", "int64", ("batch", "seq")),), joins="equal")

    async def story(engine: TensorEngine) -> None:
        given = fake.tokenize(["a", "bbb", "cc"])
        found = (await infer_rows(engine, given, timeout=9)).outputs["ids"]
        assert (found == given["input_ids"]).all()

    with_engine(fake, story)
    assert sorted(fake.batches) == [1, 1, 1]


@pytest.mark.parametrize(("joins", "sizes"), [("padded", {4}), ("equal", {1, 2}), ("none", {1})])
def test_requests_meet_in_batches_as_their_model_allows(joins: str, sizes: set[int]) -> None:
    fake = embedder()
    fake.change(joins=joins)

    async def story(engine: TensorEngine) -> None:
        texts = ("a", "bbb", "cc", "ddd")
        answers = await asyncio.gather(*(engine.infer(fake.tokenize([text]), timeout=9) for text in texts))
        assert [one.outputs["embedding"][0, 1] for one in answers] == [2, 4, 3, 4]
        assert {one.batch_size for one in answers} == sizes

    with_engine(fake, story)


def test_waiting_requests_share_a_batch_and_get_their_own_rows() -> None:
    gate = Gate()

    async def story(engine: TensorEngine) -> None:
        first = await gate.occupied(engine)
        others = [asyncio.create_task(engine.infer(x(*range(i, i + 2)), timeout=9)) for i in (1, 3, 5)]
        await asyncio.sleep(0)
        gate.open.set()
        answers = await asyncio.gather(first, *others)
        assert [a.outputs["y"][:, 0].tolist() for a in answers] == [[0], [2, 4], [6, 8], [10, 12]]
        assert [a.batch_size for a in answers] == [1, 6, 6, 6]

    engine = with_engine(gate.model, story)
    assert gate.model.batches == [1, 6]
    assert (engine.metrics.inferences, engine.metrics.executions) == (7, 2)


def test_items_that_join_a_delayed_batch_leave_one_timer() -> None:
    async def story(engine: TensorEngine) -> None:
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        call_later = loop.call_later

        def noted(*of: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*of))
            return timers[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_later", noted)
            tasks = []
            for value in range(5):
                tasks.append(asyncio.create_task(engine.infer(x(value), timeout=9)))
                await asyncio.sleep(0.01)
            soon = [t for t in timers if not t.cancelled() and 0 < t.when() - loop.time() < 0.5]
            assert len(soon) == 1
        assert [answer.batch_size for answer in await asyncio.gather(*tasks)] == [5] * 5

    with_engine(double(), story, max_delay_us=400_000)


def test_a_bad_request_fails_alone() -> None:
    gate = Gate()

    async def story(engine: TensorEngine) -> None:
        first = await gate.occupied(engine)
        tasks = [asyncio.create_task(engine.infer(x(value), timeout=9)) for value in (1, 666, 3)]
        await asyncio.sleep(0)
        gate.open.set()
        results = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert [isinstance(r, ValueError) for r in results] == [False, False, True, False]
        assert results[3].outputs["y"][0, 0] == 6

    with_engine(gate.model, story)
    assert gate.model.batches == [1, 3, 1, 2, 1, 1]


def test_a_request_larger_than_a_batch_is_split_and_concatenated() -> None:
    predictor = double(max_batch=4)

    async def story(engine: TensorEngine) -> None:
        answer = await engine.infer(x(*range(11)), timeout=9)
        assert answer.outputs["y"][:, 0].tolist() == [2 * i for i in range(11)]

    with_engine(predictor, story)
    assert sorted(predictor.batches) == [3, 4, 4]


def test_a_cancelled_request_leaves_the_queue_and_never_runs() -> None:
    gate = Gate()

    async def story(engine: TensorEngine) -> None:
        first = await gate.occupied(engine)
        gone = asyncio.create_task(engine.infer(x(1, 2, 3), timeout=9))
        await asyncio.sleep(0)
        assert engine.queue.requests == 1
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert engine.queue.requests == 0
        gate.open.set()
        await first

    with_engine(gate.model, story)
    assert gate.model.batches == [1]


@pytest.mark.parametrize("running", [False, True])
def test_a_deadline_ends_a_request_queued_or_running(running: bool) -> None:
    gate = Gate()

    async def story(engine: TensorEngine) -> None:
        first = None if running else await gate.occupied(engine)
        with pytest.raises(DeadlineError, match="while it ran" if running else "in the queue"):
            await engine.infer(x(1), timeout=0.05)
        gate.open.set()
        if first is not None:
            await first

    with_engine(gate.model, story)


def test_stopping_fails_every_waiting_request() -> None:
    gate = Gate()

    async def story(engine: TensorEngine) -> None:
        tasks = [await gate.occupied(engine), asyncio.create_task(engine.infer(x(1), timeout=9))]
        await asyncio.sleep(0)
        engine.stop(NotReadyError("the server is stopping"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [NotReadyError, NotReadyError]
        gate.open.set()

    with_engine(gate.model, story)


def test_draining_finishes_the_queue() -> None:
    gate = Gate()

    async def story(engine: TensorEngine) -> None:
        tasks = [await gate.occupied(engine), asyncio.create_task(engine.infer(x(4), timeout=9))]
        await asyncio.sleep(0)
        engine.drain()
        with pytest.raises(NotReadyError):
            await engine.infer(x(5), timeout=9)
        assert not engine.idle
        gate.open.set()
        assert (await asyncio.gather(*tasks))[1].outputs["y"][0, 0] == 8

    with_engine(gate.model, story)


def test_an_engine_failure_is_logged_and_fails_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    predictor = double()

    def die(inputs: Any) -> Any:
        raise SystemExit("gone")

    predictor.function = die

    async def story(engine: TensorEngine) -> None:
        assert engine.healthy
        with pytest.raises(InferError, match="the engine died"):
            await engine.infer(x(1), timeout=9)
        assert not engine.healthy

    with_engine(predictor, story)
    assert "the engine of double died" in caplog.text


def test_out_of_memory_is_a_resource_error_not_an_internal_one() -> None:
    predictor = double()

    def exhaust(inputs: Any) -> Any:
        raise MemoryError

    predictor.function = exhaust

    async def story(engine: TensorEngine) -> None:
        with pytest.raises(InferError, match="out of memory") as caught:
            await engine.infer(x(1), timeout=9)
        assert caught.value.status == 503

    with_engine(predictor, story)


def test_bfloat16_runs_in_torch_and_is_returned_as_uint16() -> None:
    import torch

    from infer.predict.tensors import CheckedRunner

    spec = TensorSpec("x", "bfloat16", ("batch", 2))
    calls = CheckedRunner(
        (spec,), (spec,), {"batch": (1, 8)}, SimpleNamespace(run=lambda inputs: {"x": inputs["x"] + 1})
    )
    bits = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16).view(torch.uint16).numpy()
    assert Collator(ModelInfo(name="bf", inputs=(spec,), outputs=(spec,))).check({"x": bits}) == {"batch": 1}
    answer = run_arrays(calls, {"x": bits})["x"]
    assert torch.from_numpy(answer).view(torch.bfloat16).tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize(("priority", "most"), [(2, 60), (5, 250)])
def test_a_flood_of_higher_priority_starves_no_item(priority: int, most: int) -> None:
    clocked = ManualClockQueue(max_batch=1)
    waits = clocked.put(timeout=1000, priority=priority)
    for count in range(1, most):
        clocked.put(timeout=1000, priority=1)
        clocked.put(timeout=1000, priority=1)
        if clocked.queue.take().items == [waits]:
            assert count > 1
            return
        clocked.clock.now += 0.1
    pytest.fail("it starved")
