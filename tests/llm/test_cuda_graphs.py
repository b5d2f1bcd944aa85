"""Steps in buckets: what is padded, recorded and replayed. The graph is a fake that calls the step again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.llm.engine.recorded.decoder import KINDS
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.llm import LanguageModel
from infer.llm.step.cuda_graphs import GraphedStep, wrap
from infer.llm.step.cuda_recorder import CudaRecorder
from infer.llm.step.full_sequence_runner import attention_inputs
from infer.llm.step.graph_inputs import (
    LARGEST,
    TOKENS,
    Bucket,
    Buffers,
    bucket_of,
    decode_buckets,
    mixed_bucket_of,
    mixed_buckets,
    mixed_inputs,
    mixed_sizes,
)
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from infer.llm.step.step_shape import StepShape
from tests.support.fake_graphs import FakeGraphs
from tests.support.tiny_decoders import VOCABULARY, build

PAGE = 4
LENGTHS = (9, 1, 14, 6, 3)


class Step:
    """The captured step of a tiny model, run by torch."""

    def __init__(self) -> None:
        model = build("llama")
        self.shape = probe(model, page=PAGE, kv_dtype="float32")
        self._model_runner = capture_step(model, self.shape).callable()
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
    shape: StepShape, cache: Tensor, done: tuple[int, ...], new: list[int], blocks: int = 5
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


def test_a_recorded_step_may_have_fewer_logit_rows_than_sequences(step: Step) -> None:
    cache = filled(step)
    named = decode(step, cache, 3)
    want = step.run(named)["logits"]
    named["logit_rows"] = torch.tensor([2])
    got = GraphedStep(step, "cpu", FakeGraphs()).run(named)["logits"]
    torch.testing.assert_close(got, want[2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("new", [[3, 2], [1, 4], [0, 2], [1, 1, 5, 1, 2], [4, 4, 4, 4, 4], [7, 0, 0, 9]])
@pytest.mark.parametrize("drafts", [False, True])
def test_prompts_and_drafts_are_replayed_as_the_plain_step(step: Step, new: list[int], drafts: bool) -> None:
    plain, cache, recorder = filled(step), filled(step), FakeGraphs()
    graphed = GraphedStep(step, "cpu", recorder)
    for _ in range(2):
        wanted = inputs(step.shape, plain, LENGTHS[: len(new)], new)
        if not drafts:  # logits of the last token of each sequence that has one
            wanted["logit_rows"] = (wanted["query_start"][1:] - 1)[torch.tensor(new) > 0].long()
        named = {**wanted, "kv_cache": cache}
        assert bucket_of(named) is None
        got, want = graphed.run(named)["logits"], step.run(wanted)["logits"]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cache.view(torch.float32), plain.view(torch.float32), rtol=1e-4, atol=1e-5)
    assert (recorder.records, recorder.replays) == (1, 2)


def test_a_step_larger_than_every_bucket_runs_unrecorded(step: Step) -> None:
    wide = {"block_table": torch.zeros(2, 1), "query_start": torch.zeros(3), "logit_rows": torch.zeros(1)}
    assert mixed_bucket_of({**wide, "token_ids": torch.zeros(TOKENS[-1])}) == Bucket(8, 8, TOKENS[-1])
    assert mixed_bucket_of({**wide, "token_ids": torch.zeros(TOKENS[-1] + 1)}) is None
    wide["logit_rows"] = torch.zeros(LARGEST + 1)
    assert mixed_bucket_of({**wide, "token_ids": torch.zeros(LARGEST + 1)}) is None


def test_no_other_bucket_is_recorded_once_some_are_prepared(step: Step) -> None:
    cache, recorder = filled(step), FakeGraphs()
    graphed = GraphedStep(step, "cpu", recorder)
    graphed.prepare(cache, mixed_buckets(16, 4, 20, drafts=False))
    recorded = recorder.records
    prompts = inputs(step.shape, cache, (0, 0), [3, 2])
    graphed.run(prompts)  # of 20 blocks at most, though it has 5
    assert (recorder.records, recorder.replays) == (recorded, 1)
    drafts = inputs(step.shape, cache, (0, 0), [5, 6])  # more rows of logits than sequences
    assert graphed.run(drafts)["logits"].shape == (11, VOCABULARY)
    assert (recorder.records, recorder.replays) == (recorded, 1)


@pytest.mark.parametrize(("tokens", "running", "blocks"), [(16, 3, 2), (100, 64, 9), (2048, 256, 40)])
def test_the_mixed_buckets_cover_every_step_of_the_limits(tokens: int, running: int, blocks: int) -> None:
    listed = set(mixed_buckets(tokens, running, blocks, drafts=True))
    for count in {1, 2, 8, 9, running}:
        for size in {count, min(count + 3, tokens), tokens}:
            for rows in (1, count, size):
                named = {"block_table": torch.zeros(count, 1), "query_start": torch.zeros(count + 1)}
                named |= {"token_ids": torch.zeros(size), "logit_rows": torch.zeros(rows)}
                found = mixed_bucket_of(named, max(bucket.blocks for bucket in listed))
                if count <= min(running, size):
                    assert found in listed if size <= TOKENS[-1] and rows <= LARGEST else True
                    assert found is None or (found.tokens >= size and found.num_rows >= rows)


class OutOfResources(Exception):  # noqa: N818 - the name of Triton's own, which is no RuntimeError either
    """Error of a kernel that needs more shared memory than there is."""


@pytest.mark.parametrize("raised", [RuntimeError, OutOfResources])
def test_a_failed_recording_is_reported_once_and_the_step_still_runs(
    step: Step, raised: type[Exception]
) -> None:
    cache = filled(step)
    want = step.run(decode(step, cache, 2))["logits"]
    said = "operation not permitted when stream is capturing\nmore"
    graphed = GraphedStep(step, "cpu", FakeGraphs(said, raised=raised))
    for _ in range(2):
        assert torch.equal(graphed.run(decode(step, cache, 2))["logits"], want)
    assert [(f.value, f.why) for f in graphed.findings] == [
        ("refused", "operation not permitted when stream is capturing")
    ]


def test_another_cache_discards_recorded_graphs(step: Step) -> None:
    recorder = FakeGraphs()
    graphed = GraphedStep(step, "cpu", recorder)
    one, other = filled(step), filled(step)
    for cache in (one, other, other):
        graphed.run(decode(step, cache, 1))
    assert (recorder.records, recorder.clears) == (2, 1)


def test_a_failed_recording_disables_its_own_bucket_only(step: Step) -> None:
    cache, recorder = filled(step), FakeGraphs("out of memory")
    graphed = GraphedStep(step, "cpu", recorder)
    graphed.run(decode(step, cache, 4))
    recorder.error = ""
    for count in (1, 4):
        graphed.run(decode(step, cache, count))
    assert (recorder.records, recorder.replays) == (1, 1)
    assert [(f.what.split(",")[0], f.value) for f in graphed.findings] == [
        ("CUDA graph of 4 sequences", "refused"),
        ("CUDA graph of 1 sequences", "recorded"),
    ]
    assert graphed.refused == {Bucket(4, 8): "out of memory"}


class FakeCuda:
    """Stand-in of `torch.cuda`: counts pools, and notes pool and stream of each recording."""

    def __init__(self) -> None:
        self.pools, self.used = 0, list[tuple[int, object]]()
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        self.Event, self.device = SimpleNamespace, lambda device: contextlib.nullcontext()
        self.current_stream = self.Stream = lambda *_: SimpleNamespace(wait_stream=lambda other: None)
        self.stream = lambda stream: contextlib.nullcontext()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def graph(self, graph: object, *, pool: int, stream: object, capture_error_mode: str) -> Any:
        self.used.append((pool, stream))
        return contextlib.nullcontext()


def test_cleared_graphs_leave_their_pool_and_keep_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    recorders = [CudaRecorder("cuda"), CudaRecorder("cuda")]
    for recorder in recorders:
        recorder.record(lambda: torch.zeros(1))
    recorders[0].clear()
    recorders[0].record(lambda: torch.zeros(1))
    pools, streams = zip(*fake.used, strict=True)
    assert pools == (1, 2, 3)
    assert streams[0] is streams[2]
    assert streams[0] is not streams[1]


def test_buckets_can_be_recorded_before_their_first_step(step: Step) -> None:
    cache, recorder = filled(step), FakeGraphs()
    before = cache.clone()
    graphed = GraphedStep(step, "cpu", recorder)
    graphed.prepare(cache, [Bucket(1, 8), Bucket(2, 8)])
    assert torch.equal(cache, before)  # padding writes nothing
    graphed.run(decode(step, cache, 2))
    assert recorder.records == 2
    graphed.close()
    assert step.closed


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_a_warm_up_step_runs_and_writes_nothing(step: Step, tokens: int) -> None:
    cache = filled(step)
    before = cache.clone()
    graphed = GraphedStep(step, "cpu", FakeGraphs())
    graphed.warm(cache, [tokens], PAGE)
    assert torch.equal(cache, before)
    assert graphed.findings == []
    assert step.run({**mixed_inputs(tokens, PAGE), "kv_cache": cache})["logits"].isfinite().all()


def test_a_warm_up_step_that_fails_is_reported(step: Step) -> None:
    class Full:
        def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            raise RuntimeError("out of memory\nmore")

    graphed = GraphedStep(Full(), "cpu", FakeGraphs())
    graphed.warm(torch.zeros(1), [2, 4], PAGE)
    assert [(f.what, f.value, f.why) for f in graphed.findings] == [
        (f"warm-up of {tokens} tokens", "failed", "out of memory") for tokens in (2, 4)
    ]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [2]), (16, [2, 4, 8, 16]), (20, [2, 4, 8, 16, 20])]
)
def test_kernels_are_warmed_for_every_power_of_two(most: int, sizes: list[int]) -> None:
    assert mixed_sizes(most) == sizes


def test_every_bucket_is_recorded_before_the_first_request(step: Step, tmp_path: Path) -> None:
    recorder = FakeGraphs()
    graphed = GraphedStep(step, "cpu", recorder)
    room = 40 * step.shape.layers * step.shape.page_bytes
    limits = EngineLimits(max_running=3, step_tokens=16, mixed_tokens=8)
    model = LanguageModel(graphed, step.shape, tmp_path, kv_bytes=room, limits=limits)
    prompt = Request(
        id="a", prompt=[3, 4, 5], sampling=Sampling(max_tokens=4, ignore_eos=True, temperature=0)
    )
    done = threading.Event()
    try:
        model.engine_client.submit(prompt, lambda outputs: outputs[-1].finish and done.set())
        recorded, blocks = recorder.records, -(-model.context // PAGE)
        assert done.wait(30)
    finally:
        model.close()
    widths = len({bucket.blocks for bucket in decode_buckets(3, blocks)})
    mixed = len(mixed_buckets(16, 3, blocks, drafts=True))
    assert recorded == recorder.records == 3 * widths + mixed + 3 * len(KINDS)
    assert (
        recorder.replays == 1 + 2 * 3
    )  # of the prompt; of the model and the sampler, for each token but the first


@pytest.mark.parametrize(
    ("running", "blocks", "buckets"),
    [
        (1, 1, [(1, 8)]),
        (3, 9, [(1, 8), (2, 8), (4, 8), (1, 32), (2, 32), (4, 32)]),
        (1000, 8, [(1 << power, 8) for power in range(9)]),
    ],
)
def test_the_buckets_cover_every_decode_step(
    running: int, blocks: int, buckets: list[tuple[int, int]]
) -> None:
    assert [(bucket.batch, bucket.blocks) for bucket in decode_buckets(running, blocks)] == buckets


@pytest.mark.parametrize(
    ("count", "blocks", "bucket"),
    [(1, 1, (1, 8)), (2, 8, (2, 8)), (3, 9, (4, 32)), (9, 33, (16, 128)), (256, 1, (256, 8)), (257, 1, None)],
)
def test_the_bucket_is_the_smallest_that_holds_the_step(
    step: Step, count: int, blocks: int, bucket: tuple[int, int] | None
) -> None:
    named = inputs(step.shape, torch.zeros(0), (1,) * count, [1] * count, blocks)
    assert bucket_of(named) == (None if bucket is None else Bucket(*bucket))


def test_inputs_staged_for_an_earlier_step_are_overwritten(step: Step) -> None:
    buffers = Buffers(Bucket(4, 8), "cpu")
    empty = {name: value.clone() for name, value in buffers.inputs.items()}
    buffers.fill(inputs(step.shape, torch.zeros(0), LENGTHS[:4], [1] * 4))
    buffers.fill(inputs(step.shape, torch.zeros(0), LENGTHS[:1], [1]))
    buffers.copy_to_device()
    for name, value in buffers.inputs.items():
        rows = slice(2, None) if name == "query_start" else slice(1, None)
        columns = (slice(0, 1),) if name == "block_table" else ()
        assert torch.equal(value[(rows, *columns)], empty[name][(rows, *columns)]), name


def test_graphs_are_recorded_on_cuda_only(step: Step) -> None:
    assert wrap(step, "cpu") is step
