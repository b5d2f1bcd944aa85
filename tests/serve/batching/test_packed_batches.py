"""Batches of models that compute no padding: one batch key for all lengths, limits and predictions by real tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infer.artifact.model_info import ModelInfo
from infer.compress import quantize_model
from infer.errors import NotReadyError, OverloadedError
from infer.graph.program import TorchGraph
from infer.kernels.cpu import build as compiling
from infer.kernels.passes import prepack
from infer.plan import Plan
from infer.predict.tensors import CheckedRunner
from infer.serve.batching.collate import Collator
from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.batching.text_inputs import infer_rows
from infer.serve.limits import ServeLimits
from infer.serve.observability.metrics import Metrics
from infer.serve.served_model import ServedModel
from infer.spec import TensorSpec, work_of_rows
from tests.kernels.test_fused_encoder_layers import WIDTH
from tests.kernels.test_padding_rows import ROWS, TOKENS, Pooled
from tests.support.fake_predictors import Fake, embedder
from tests.support.manual_clock_queue import ManualClockQueue

LENGTHS = [8, 130, 17, 64, 31, 5, 200, 9]


def tokens(lengths: list[int], width: int = 0) -> dict[str, np.ndarray]:
    """Return input_ids and attention_mask int64 [len(lengths), longest], padded at the end."""
    mask = (np.arange(width or max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    draw = np.random.default_rng(sum(lengths))
    return {"input_ids": draw.integers(1, 50, mask.shape) * mask, "attention_mask": mask}


def padding_free(attention_length: int = 100) -> Fake:
    fake = embedder()
    fake.change(attention_length=attention_length)
    return fake


def measured(queue: ManualClockQueue, fixed: float, each: float) -> None:
    for work in (10, 40, 20, 80) * 8:
        queue.latency.observe(work, fixed + each * work)


def test_rows_of_all_lengths_have_one_batch_key_and_their_own_work() -> None:
    layout, buckets = Collator(padding_free().info), Collator(embedder().info)
    short, long = layout.measure(tokens([5])), layout.measure(tokens([200]))
    assert layout.packed
    assert short.key == long.key
    assert (short.row_work, long.row_work) == (5 * 1.05, 200 * 3.0)
    assert not buckets.packed
    assert buckets.measure(tokens([5])).key != buckets.measure(tokens([200])).key
    assert buckets.measure(tokens([5])).row_work == 0


def test_padding_within_a_request_is_no_work() -> None:
    layout = Collator(padding_free().info)
    assert layout.measure(tokens([5, 20], width=200)).row_work == work_of_rows([5, 20], 100) / 2
    assert layout.measure(tokens([0], width=9)).row_work > 0


def test_a_model_without_mask_or_padding_values_keeps_its_keys() -> None:
    fake = padding_free()
    fake.change(padding={"input_ids": 0})
    assert not Collator(fake.info).packed
    fake = padding_free()
    fake.change(inputs=fake.info.inputs[:1])
    assert not Collator(fake.info).packed


def test_the_work_of_a_packed_batch_is_the_sum_of_its_rows() -> None:
    clocked = ManualClockQueue(max_batch=32, packed=True)
    for _ in range(31):
        clocked.put(elements=8, row_work=8)
    clocked.put(elements=256, row_work=300)
    clocked.queue.take()
    assert clocked.queue.running[0][0] == 31 * 8 + 300
    padded = ManualClockQueue(max_batch=32)
    for elements in [8] * 31 + [256]:
        padded.put(elements=elements)
    padded.queue.take()
    assert padded.queue.running[0][0] == 32 * 256


def test_predicted_wait_counts_tokens_not_the_longest_row() -> None:
    clocked = ManualClockQueue(max_batch=32, packed=True)
    measured(clocked, 0.0, 0.0001)
    for _ in range(10):
        clocked.put(elements=8, row_work=8)
    clocked.put(elements=256, row_work=320)
    assert clocked.wait() == pytest.approx(0.04, rel=0.05)


def test_a_packed_batch_ends_where_more_work_gains_no_throughput() -> None:
    clocked = ManualClockQueue(max_batch=32, packed=True)
    measured(clocked, 0.001, 0.0001)  # useful: 100 tokens
    items = [clocked.put(row_work=work) for work in (60, 30, 90, 9, 40)]
    taken = clocked.queue.take()
    assert taken.items == [items[0], items[1], items[3]]
    assert taken.reason == "full"
    taken = clocked.queue.take()
    assert (taken.items, taken.reason) == ([items[2]], "full")
    assert clocked.queue.take().reason == "idle"


def test_a_long_backlog_makes_packed_batches_larger() -> None:
    clocked = ManualClockQueue(max_batch=256, packed=True)
    measured(clocked, 0.001, 0.0001)
    for _ in range(90):
        clocked.put(row_work=10)
    assert len(clocked.queue.take().items) == 30
    assert len(clocked.queue.take().items) == 20


def test_one_long_row_runs_and_is_not_overtaken_for_ever() -> None:
    clocked = ManualClockQueue(max_batch=8, packed=True)
    measured(clocked, 0.001, 0.0001)
    first, long = clocked.put(row_work=90), clocked.put(row_work=1000)
    short = [clocked.put(row_work=5) for _ in range(3)]
    assert long not in clocked.queue.take().items
    assert clocked.queue.take().items[0] is long
    assert not first.waiting
    assert not any(item.waiting for item in short)


def test_a_packed_batch_is_cut_where_an_item_would_miss_its_deadline() -> None:
    clocked = ManualClockQueue(max_batch=8, packed=True)
    measured(clocked, 0.01, 0.0001)  # useful: 1000 tokens
    urgent = clocked.put(row_work=100, timeout=0.04)
    late = clocked.put(row_work=400, timeout=9)
    fits = clocked.put(row_work=50, timeout=9)
    taken = clocked.queue.take()
    assert taken.items == [urgent, fits]
    assert taken.reason == "deadline"
    assert clocked.queue.take().items == [late]


def test_admission_refuses_by_tokens_and_a_cancelled_item_frees_them() -> None:
    clocked = ManualClockQueue(max_batch=8, packed=True)
    measured(clocked, 0.0, 0.001)
    long = clocked.put(elements=512, row_work=600, priority=1)
    clocked.put(row_work=10)
    with pytest.raises(OverloadedError, match="predicted completion"):
        clocked.put(row_work=10, timeout=0.3)
    assert clocked.queue.cancel(long)
    clocked.put(row_work=10, timeout=0.3)
    assert clocked.ahead()[1] == 20
    assert long not in clocked.queue.take().items


def test_the_memory_limit_of_a_packed_batch_counts_its_arrays() -> None:
    clocked = ManualClockQueue(max_batch=8, packed=True, max_batch_elements=40)
    a, b = clocked.put(elements=4, row_work=4), clocked.put(elements=40, row_work=40)
    assert clocked.queue.take().items == [a]
    assert clocked.queue.take().items == [b]


def test_tenants_of_a_packed_model_share_it_by_tokens() -> None:
    clocked = ManualClockQueue(max_batch=1, packed=True)
    measured(clocked, 0.0, 0.0001)
    for _ in range(40):
        clocked.put(tenant="long", elements=1, row_work=100)
        clocked.put(tenant="short", elements=1, row_work=10)
    taken = [item for _ in range(22) for item in clocked.run(0.0)]
    assert sum(item.tenant == "long" for item in taken) in (2, 3)


class Encoder(nn.Module):
    """Token embeddings, two layers and the mean of the real tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.pooled = nn.Embedding(50, WIDTH), Pooled("mean")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        pooled: Tensor = self.pooled(self.embedding(input_ids), attention_mask)
        return pooled


@pytest.fixture(scope="module")
def encoder() -> ServedModel:
    """Open a random int8 encoder of the eager backend."""
    if compiling.compiler() is None:
        pytest.skip("no C++ compiler")
    from backends import eager

    torch.manual_seed(0)
    model = Encoder().eval()
    quantize_model(model, Plan(source="test", quant="int8"))
    samples = {name: torch.from_numpy(array) for name, array in tokens([5, 17, 9]).items()}
    sizes: Any = {name: {0: ROWS, 1: TOKENS} for name in samples}
    with torch.no_grad():
        program = torch.export.export(model, (), samples, dynamic_shapes=sizes, strict=False)
    inputs = tuple(TensorSpec(name, "int64", ("batch", "seq")) for name in samples)
    outputs = (TensorSpec("embedding", "float32", ("batch", WIDTH)),)
    limits = {"batch": (1, 64), "seq": (1, 600)}
    graph = TorchGraph(inputs, outputs, samples, limits, program=prepack.packed(program))
    calls = CheckedRunner(inputs, outputs, limits, eager.Runner(graph, "cpu"))
    info = ModelInfo(
        name="encoder",
        inputs=inputs,
        outputs=outputs,
        sizes=limits,
        max_batch=calls.max_batch,
        padding=dict.fromkeys(samples, 0),
        attention_length=calls.attention_length,
    )
    return ServedModel(info=info, close=calls.close, run=calls.predict)


def run_together(model: ServedModel, requests: list[dict[str, np.ndarray]], cancel: int = -1) -> list[Any]:
    """Queue all requests before any runs; return their results, and cancel the one at `cancel`."""
    engine = TensorEngine(model, ServeLimits(), Metrics("test").model("encoder", "1"))

    async def main() -> list[Any]:
        engine.start(asyncio.get_running_loop())
        tasks = [asyncio.ensure_future(infer_rows(engine, one, timeout=60)) for one in requests]
        await asyncio.sleep(0)
        if cancel >= 0:
            tasks[cancel].cancel()
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            engine.stop(NotReadyError("over"))

    results = asyncio.run(main())
    assert engine.join(5)
    return results


@pytest.mark.filterwarnings("ignore")  # the exporter has many to give
def test_served_rows_are_bit_equal_to_single_runs(encoder: ServedModel) -> None:
    assert encoder.info.attention_length
    requests = [tokens([length]) for length in LENGTHS]
    alone = [encoder.run(one)["embedding"] for one in requests]
    results = run_together(encoder, requests)
    assert {result.batch_size for result in results} == {len(LENGTHS)}
    for result, expected in zip(results, alone, strict=True):
        assert (result.outputs["embedding"] == expected).all()


@pytest.mark.filterwarnings("ignore")
def test_texts_of_one_request_run_in_one_batch_and_in_order(encoder: ServedModel) -> None:
    request = tokens(LENGTHS)
    (result,) = run_together(encoder, [request])
    assert result.batch_size == len(LENGTHS)
    for row, length in enumerate(LENGTHS):
        own = {name: np.ascontiguousarray(array[row : row + 1, :length]) for name, array in request.items()}
        assert (result.outputs["embedding"][row] == encoder.run(own)["embedding"][0]).all()


@pytest.mark.filterwarnings("ignore")
def test_a_cancelled_long_request_does_not_change_other_results(encoder: ServedModel) -> None:
    requests = [tokens([length]) for length in LENGTHS]
    results = run_together(encoder, requests, cancel=6)
    assert isinstance(results[6], asyncio.CancelledError)
    for at in (0, 1, 7):
        assert (results[at].outputs["embedding"] == encoder.run(requests[at])["embedding"]).all()
