"""Coalesced requests: same result as alone; cancellation and errors affect one request only."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer.artifact.model_info import ModelInfo
from infer.serve.api.kserve.kserve_response import encode_response, encode_responses
from infer.serve.api.kserve.kserve_types import InferInput, InferRequest
from infer.serve.batching.collate import Collator
from infer.serve.batching.infer_result import InferResult
from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.fast_path.body_cache import BodyCache
from infer.serve.fast_path.fast_request import slice_request
from infer.serve.limits import ServeLimits
from infer.serve.workers.messages import ModelSource
from infer.serve.workers.model_loading import StartingModel
from infer.spec import TensorSpec
from tests.support.fake_predictors import Fake, Live, double, live
from tests.support.raw_http import BODY, ask, connect, get, read, send
from tests.support.simultaneous_requests import crowd, doubled, row, standing, until
from tests.support.worker_models import DIE, RAISE


@pytest.mark.parametrize("binary", [False, True])
def test_responses_written_together_equal_those_written_one_by_one(binary: bool) -> None:
    specs = tuple(TensorSpec(n, d, ("batch", 3)) for n, d in (("f", "float32"), ("i", "int8"), ("b", "bool")))
    engine: Any = SimpleNamespace(info=ModelInfo(name="ä"), metrics=None)
    dice = np.random.default_rng(0)
    floats = np.concatenate([dice.standard_normal((5, 3)) * 1e15, [[0, -0.0, 1e-30]]]).astype(np.float32)
    outputs = {"f": floats, "i": dice.integers(-128, 128, (6, 3)).astype(np.int8), "b": floats > 0}
    answer = InferResult(outputs, 0.25, 0.5, 6)
    wanted = [(spec, binary) for spec in specs]
    for count in (1, 2, 3, 6):
        written = encode_responses(engine, answer, wanted, count)
        assert written is not None
        media, headers, bodies = written
        for at, body in enumerate(bodies):
            reply = encode_response(engine, None, slice_request(answer, at, count), wanted)
            assert (reply.body, reply.media, reply.headers) == (body, media, headers)
    assert encode_responses(engine, answer, [(specs[0], binary), (specs[1], not binary)], 2) is None
    outputs["f"][0, 0] = np.nan
    assert encode_responses(engine, answer, wanted, 2) is None


def test_raw_tensors_read_together_equal_those_read_one_by_one() -> None:
    specs = TensorSpec("a", "float64", ("batch", 2)), TensorSpec("b", "int8", ("batch",))
    layout = Collator(
        ModelInfo(name="m", inputs=specs, outputs=specs[:1], sizes={"batch": (1, 8)}, max_batch=8)
    )
    arrays = [
        {"a": np.full((3, 2), n, np.float64), "b": np.arange(n, n + 3, dtype=np.int8)} for n in range(4)
    ]
    raw = [one["a"].tobytes() + one["b"].tobytes() for one in arrays]
    given = [InferInput(name=n, datatype=d, shape=[3]) for n, d in (("a", "FP64"), ("b", "INT8"))]
    for one, size in zip(given, (48, 3), strict=True):
        one.parameters = {"binary_data_size": size}
    cache = BodyCache(layout)
    inputs = [(spec, arrays[0][spec.name]) for spec in specs]
    cache.learn(b"{}" + raw[0], InferRequest(inputs=given), inputs, [], 2)
    found = cache.templates[b"{}"].read(raw)
    assert found is not None
    for name in ("a", "b"):
        assert np.array_equal(found[name], np.concatenate([one[name] for one in arrays]))


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of requests of each queued group."""
    sizes, submit = list[int](), TensorEngine.submit_group

    def counted(self, item):  # type: ignore[no-untyped-def]
        sizes.append(item.requests)
        return submit(self, item)

    monkeypatch.setattr(TensorEngine, "submit_group", counted)
    return sizes


def known(server: Live, *requests: bytes) -> None:
    """Teach the fast path their heads and templates."""
    for request in requests:
        for _ in range(2):
            assert ask(server, request).status == 200


def test_requests_of_one_loop_iteration_are_one_item(groups: list[int], resumed: list[bytes]) -> None:
    with live(double()) as server:
        known(server, row(0, 0, 0, 0))
        answers = crowd(server, [row(n, 0, 0, -n) for n in range(20)])
        assert [doubled(one) for one in answers] == [[2 * n, 0, 0, -2 * n] for n in range(20)]
        assert len({one.headers[b"x-request-id"] for one in answers}) == 20
        assert (groups, resumed) == ([8, 8, 4], [])
        assert server.service.engines["double"].model.batches[2:] == [8, 8, 4]
        text = ask(server, get(b"/metrics")).body.decode()
        labels = '{model="double",version="1"}'
        assert 'infer_requests_total{api="kserve",code="200",model="double",version="1"} 22.0' in text
        for name in ("infer_queue_seconds", "infer_request_seconds"):
            assert f"{name}_count{labels} 22.0" in text
        until(lambda: server.service.active == 0)
        assert server.service.engines["double"].idle


def test_requests_of_two_models_are_never_coalesced(groups: list[int], resumed: list[bytes]) -> None:
    halves = double("halves")
    halves.function = lambda inputs: {"y": inputs["x"] / 2, "rows": np.arange(len(inputs["x"]))}

    def of_halves(request: bytes) -> bytes:
        return request.replace(b"/models/double/", b"/models/halves/")

    with live(double(), halves) as server:
        known(server, row(0, 0, 0, 0))
        known(server, of_halves(row(0, 0, 0, 0)))
        asked = [row(n, 0, 0, 4) for n in range(6)]
        asked = [of_halves(one) if n % 2 else one for n, one in enumerate(asked)]
        assert asked[0] != asked[1]
        answers = crowd(server, asked)
        assert [doubled(one) for one in answers] == [
            [n / 2, 0, 0, 2] if n % 2 else [2 * n, 0, 0, 8] for n in range(6)
        ]
        assert (sorted(groups), resumed) == ([3, 3], [])


def test_a_coalesced_request_that_raises_fails_alone(groups: list[int], resumed: list[bytes]) -> None:
    with live(double()) as server:
        known(server, row(0, 0, 0, 0))
        answers = crowd(server, [row(666 if n == 3 else n, 0, 0, 0) for n in range(6)])
        assert [one.status for one in answers] == [200, 200, 200, 500, 200, 200]
        assert [doubled(one)[0] for one in answers if one.status == 200] == [0, 2, 4, 8, 10]
        assert (groups, resumed) == ([6], [])
        assert b"secret" not in answers[3].body


def test_a_coalesced_request_with_nan_output_is_answered_alone(
    groups: list[int], resumed: list[bytes]
) -> None:
    fake = double()
    fake.function = lambda inputs: {"y": np.where(inputs["x"] == 1, np.float32(np.inf), inputs["x"] * 2)}
    fake.change(outputs=fake.info.outputs[:1])
    for refuse in (False, True):
        with live(fake, limits=ServeLimits(nonfinite_error=refuse)) as server:
            known(server, row(0, 0, 0, 0))
            answers = crowd(server, [row(n, 0, 0, 0) for n in range(3)])
            assert [one.status for one in answers] == [200, 500 if refuse else 200, 200]
            assert doubled(answers[2]) == [4, 0, 0, 0]
            assert refuse or doubled(answers[1])[0] == "Infinity"  # type: ignore[comparison-overlap]
            assert b"infer_nonfinite_outputs_total" in ask(server, get(b"/metrics")).body
    assert (groups, resumed) == ([3, 3], [])


def blocked() -> tuple[Fake, threading.Event, threading.Event]:
    """Serve a model whose batches start and wait."""
    fake, entered, go = double(), threading.Event(), threading.Event()
    run = fake.function

    def wait(inputs: Any) -> Any:
        if inputs["x"][0, 0] == 99:
            entered.set()
            assert go.wait(20)
        return run(inputs)

    fake.function = wait
    return fake, entered, go


def test_a_coalesced_request_whose_client_left_is_not_computed(groups: list[int]) -> None:
    fake, entered, go = blocked()
    with live(fake) as server, ExitStack() as stack:
        known(server, row(0, 0, 0, 0))
        engine = server.service.engines["double"]
        first, *clients = [stack.enter_context(connect(server)) for _ in range(5)]
        first.sendall(row(99, 0, 0, 0))
        assert entered.wait(20)
        with standing(server):
            for n, client in enumerate(clients):
                client.sendall(row(n, 0, 0, 0))
        until(lambda: engine.waiting == 4)
        clients[1].close()
        until(lambda: engine.waiting == 3)
        go.set()
        assert [doubled(read(client, bytearray()))[0] for client in (first, *clients[:1], *clients[2:])] == [
            198, 0, 4, 6,
        ]  # fmt: skip
        assert fake.batches[2:] == [1, 3]
        assert groups == [1, 4]
        text = ask(server, get(b"/metrics")).body
        assert b'infer_cancelled_total{model="double",stage="queued",version="1"} 1.0' in text
        assert b'code="499"' in text
        until(lambda: server.service.active == 0)


def test_coalesced_requests_past_their_deadline_fail_each(groups: list[int]) -> None:
    fake, entered, go = blocked()
    late = b"X-Request-Timeout-Ms: 200"
    with live(fake) as server, ExitStack() as stack:
        known(server, row(0, 0, 0, 0), send(BODY, late))
        first, *clients = [stack.enter_context(connect(server)) for _ in range(4)]
        first.sendall(row(99, 0, 0, 0))
        assert entered.wait(20)
        with standing(server):
            for client in clients:
                client.sendall(send(BODY, late))
        answers = [read(client, bytearray()) for client in clients]
        assert [one.status for one in answers] == [504] * 3
        go.set()
        assert read(first, bytearray()).status == 200
        text = ask(server, get(b"/metrics")).body
        assert b'infer_deadline_exceeded_total{model="double",version="1"} 3.0' in text
        until(lambda: server.service.active == 0)


def test_a_coalesced_request_that_crashes_a_worker_fails_alone(
    groups: list[int], resumed: list[bytes]
) -> None:
    source = ModelSource(path="double", opener="tests.support.worker_models:FaultyModel")
    with closing(StartingModel(source).wait_ready()) as predictor, live(predictor) as server:
        known(server, row(0, 0, 0, 0))
        for hazard in (int(RAISE), int(DIE)):
            answers = crowd(server, [row(hazard if n == 2 else n, 0, 0, 0) for n in range(5)])
            assert [one.status == 200 for one in answers] == [True, True, False, True, True]
            assert [doubled(one)[0] for one in answers if one.status == 200] == [0, 2, 6, 8]
        assert (groups, resumed) == ([5, 5], [])
        again = ask(server, row(int(DIE), 0, 0, 0))
        assert again.status == answers[2].status  # of the model nobody asks that any more
        assert (
            b'infer_worker_deaths_total{model="double",version="1"} 2.0' in ask(server, get(b"/metrics")).body
        )
        until(lambda: server.service.active == 0)
