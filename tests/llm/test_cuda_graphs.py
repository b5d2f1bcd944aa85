"""Decode steps in buckets: what is padded, recorded and replayed. The graph is a fake that calls the step again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from infer import llm
from infer.llm.step.cuda_graphs import Bucket, Buffers, GraphedStep, bucket_of, wrap
from infer.llm.step.full_sequence import attention_inputs
from tests.support.tiny_decoders import VOCABULARY, build

PAGE = 4
LENGTHS = (9, 1, 14, 6, 3)


class FakeGraphs:
    """Stand-in of `torch.cuda` graphs: a call is recorded with its addresses and run again by replay."""

    def __init__(self, error: str = "") -> None:
        self.error, self.records, self.replays = error, 0, 0

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        if self.error:
            raise RuntimeError(self.error)
        self.records += 1
        result = call()

        def replay() -> None:
            self.replays += 1
            result.copy_(call())

        return replay, result

    def sent(self) -> None: ...

    def settle(self) -> None: ...


class Step:
    """The captured step of a tiny model, run by torch."""

    def __init__(self) -> None:
        model = build("llama")
        self.shape = llm.probe(model, page=PAGE, kv_dtype="float32")
        self._model_runner = llm.capture_step(model, self.shape).callable()
        self.closed = False

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": self._model_runner(**inputs)[0]}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def step() -> Step:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of the exporter
        return Step()


def inputs(
    shape: llm.StepShape, cache: Tensor, done: tuple[int, ...], new: list[int], blocks: int = 5
) -> dict[str, Tensor]:
    table = torch.arange(1, 1 + len(done) * blocks, dtype=torch.int32).reshape(len(done), blocks)
    named = attention_inputs(shape, done, new, table)
    count = sum(new)
    ids = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(count))
    return {"token_ids": ids, "logit_rows": torch.arange(count), "kv_cache": cache, **named}


def filled(step: Step) -> Tensor:
    """Make a cache with the past of all sequences."""
    cache = step.shape.new_cache(40)
    step.run(inputs(step.shape, cache, (0,) * len(LENGTHS), list(LENGTHS)))
    return cache


def decode(step: Step, cache: Tensor, count: int, blocks: int = 5) -> dict[str, Tensor]:
    return inputs(step.shape, cache, LENGTHS[:count], [1] * count, blocks)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_replayed_step_gives_the_logits_and_the_cache_of_the_plain_one(step: Step, count: int) -> None:
    plain, cache = filled(step), filled(step)
    graphed = GraphedStep(step, "cpu", FakeGraphs())
    want = step.run(decode(step, plain, count))["logits"]
    got = graphed.run(decode(step, cache, count))["logits"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.view(torch.float32), plain.view(torch.float32), rtol=1e-4, atol=1e-5)


def test_batches_of_one_bucket_share_a_recording_and_keep_their_answers(step: Step) -> None:
    cache, recorder = filled(step), FakeGraphs()
    graphed = GraphedStep(step, "cpu", recorder)
    first = graphed.run(decode(step, cache, 5))["logits"]
    kept = first.clone()
    for count in (5, 4, 3):
        assert graphed.run(decode(step, cache, count))["logits"].shape == (count, VOCABULARY)
    assert torch.equal(first, kept)
    assert (recorder.records, recorder.replays) == (2, 4)
    assert [f.value for f in graphed.findings] == ["recorded", "recorded"]


def test_fewer_rows_of_logits_than_sequences(step: Step) -> None:
    cache = filled(step)
    named = decode(step, cache, 3)
    want = step.run(named)["logits"]
    named["logit_rows"] = torch.tensor([2])
    got = GraphedStep(step, "cpu", FakeGraphs()).run(named)["logits"]
    torch.testing.assert_close(got, want[2:], rtol=1e-4, atol=1e-5)


def test_prefill_and_mixed_steps_run_as_they_are(step: Step) -> None:
    cache, recorder = step.shape.new_cache(40), FakeGraphs()
    graphed = GraphedStep(step, "cpu", recorder)
    for new in ([3, 2], [1, 4], [0, 2]):
        named = inputs(step.shape, cache, (0, 0), new)
        assert bucket_of(named) is None
        assert graphed.run(named)["logits"].shape == (sum(new), VOCABULARY)
    assert recorder.records == 0


def test_a_failed_recording_is_reported_once_and_the_step_still_runs(step: Step) -> None:
    cache = filled(step)
    want = step.run(decode(step, cache, 2))["logits"]
    graphed = GraphedStep(step, "cpu", FakeGraphs("operation not permitted when stream is capturing\nmore"))
    for _ in range(2):
        assert torch.equal(graphed.run(decode(step, cache, 2))["logits"], want)
    assert [(f.value, f.why) for f in graphed.findings] == [
        ("refused", "operation not permitted when stream is capturing")
    ]


def test_another_cache_starts_anew(step: Step) -> None:
    recorder = FakeGraphs()
    graphed = GraphedStep(step, "cpu", recorder)
    one, other = filled(step), filled(step)
    for cache in (one, other, other):
        graphed.run(decode(step, cache, 1))
    assert recorder.records == 2


def test_buckets_may_be_recorded_ahead(step: Step) -> None:
    cache, recorder = filled(step), FakeGraphs()
    before = cache.clone()
    graphed = GraphedStep(step, "cpu", recorder)
    graphed.prepare(cache, [Bucket(1, 8), Bucket(2, 8)])
    assert torch.equal(cache, before)  # padding writes nothing
    graphed.run(decode(step, cache, 2))
    assert recorder.records == 2
    graphed.close()
    assert step.closed


@pytest.mark.parametrize(
    ("count", "blocks", "bucket"),
    [(1, 1, (1, 8)), (2, 8, (2, 8)), (3, 9, (4, 32)), (9, 33, (16, 128)), (256, 1, (256, 8)), (257, 1, None)],
)
def test_the_bucket_is_the_smallest_that_holds_the_step(
    step: Step, count: int, blocks: int, bucket: tuple[int, int] | None
) -> None:
    named = inputs(step.shape, torch.zeros(0), (1,) * count, [1] * count, blocks)
    assert bucket_of(named) == bucket


def test_what_was_staged_before_does_not_stay(step: Step) -> None:
    buffers = Buffers(Bucket(4, 8), "cpu")
    empty = {name: value.clone() for name, value in buffers.inputs.items()}
    buffers.fill(inputs(step.shape, torch.zeros(0), LENGTHS[:4], [1] * 4))
    buffers.fill(inputs(step.shape, torch.zeros(0), LENGTHS[:1], [1]))
    buffers.send()
    for name, value in buffers.inputs.items():
        rows = slice(2, None) if name == "query_start" else slice(1, None)
        columns = (slice(0, 1),) if name == "block_table" else ()
        assert torch.equal(value[(rows, *columns)], empty[name][(rows, *columns)]), name


def test_only_cuda_is_wrapped(step: Step) -> None:
    assert wrap(step, "cpu") is step
