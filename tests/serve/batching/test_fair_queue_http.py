"""Fairness between two API keys over HTTP, one of which floods a tensor model."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer.serve.batching.tensor_engine import TensorEngine
from infer.serve.limits import ServeLimits
from tests.support.fake_media import colors, png, speech, transcriber, wav
from tests.support.fake_predictors import Fake, Live, double, embedder, live
from tests.support.raw_http import BODY, connect, get, read, send
from tests.support.simultaneous_requests import doubled, standing, until

FLOOD, POLITE = "key-of-flood", "key-of-polite"
KSERVE, EMBEDDINGS = "/v2/models/double/infer", "/v1/embeddings"


class Gated:
    """A model that runs a batch only when it is let; `calls`: the first input of each."""

    def __init__(self, model: Fake) -> None:
        self.model, self.open, self.calls = model, threading.Event(), list[np.ndarray]()
        self._function = model.function
        model.function = self._run

    def _run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(next(iter(inputs.values())).copy())
        assert self.open.wait(30)
        return self._function(inputs)


def ask(server: Live, path: str, key: str, mark: int) -> httpx.Response:
    """One request, told apart by `mark`."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [mark] * 4}
    body: dict[str, Any] = {"inputs": [tensor]}
    if path == EMBEDDINGS:
        body = {"model": "embedder", "input": [[1, mark]]}
    return httpx.post(server.url + path, json=body, headers={"X-Api-Key": key}, timeout=30)


def send_file(server: Live, path: str, key: str, data: bytes) -> httpx.Response:
    """One request with a file of an image or sound."""
    headers = {"X-Api-Key": key}
    if path.startswith("/v1/audio"):
        return httpx.post(server.url + path, files={"file": ("a.wav", data)}, headers=headers, timeout=30)
    body = {"inputs": base64.b64encode(data).decode()}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=30)


@contextmanager
def flooded(
    path: str, limit: int, model: Fake | None = None, ask: Callable[..., httpx.Response] = ask, sent: Any = 5
) -> Iterator[tuple[Live, Gated, list[Future[httpx.Response]], Any]]:
    """Serve a model whose queue one key has filled, with a pool of client threads."""
    gated = Gated(model or (double(max_batch=1) if path == KSERVE else embedder()))
    gated.model.change(max_batch=1, sizes={**gated.model.info.sizes, "batch": (1, 1)})
    limits = ServeLimits(max_queue_requests=limit, max_batch=1, max_wait_seconds=1e6)
    with (
        live(gated.model, limits=limits, api_key=[FLOOD, POLITE]) as server,
        ThreadPoolExecutor(40) as pool,
    ):
        (engine,) = server.service.engines.values()
        try:
            latency = engine.queue.latency
            latency.seed([(4, 0.01)] * 3)
            vars(latency)["observe"] = lambda work, seconds: None  # the clock decides nothing here
            flood = [pool.submit(ask, server, path, FLOOD, sent) for _ in range(limit + 1)]
            until(lambda: gated.calls and engine.waiting == limit)
            yield server, gated, flood, pool
        finally:
            gated.open.set()


def number(call: np.ndarray) -> int:
    return int(call.flat[-1])


@pytest.mark.parametrize(("path", "busy"), [(KSERVE, 503), (EMBEDDINGS, 429)])
def test_a_flood_of_one_key_neither_refuses_nor_delays_another(path: str, busy: int) -> None:
    with flooded(path, 12) as (server, gated, flood, pool):
        engine: TensorEngine = next(iter(server.service.engines.values()))
        refused = [ask(server, path, FLOOD, 5) for _ in range(5)]
        assert [answer.status_code for answer in refused] == [busy] * 5
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert "12 requests" in refused[0].text
        polite = [pool.submit(ask, server, path, POLITE, 7) for _ in range(4)]
        until(lambda: engine.waiting == 16)
        assert ask(server, path, FLOOD, 5).status_code == busy
        gated.open.set()
        assert [one.result().status_code for one in polite] == [200] * 4
        assert [one.result().status_code for one in flood] == [200] * 13
    order = [number(call) for call in gated.calls]
    last = max(at for at, one in enumerate(order) if one == 7)
    assert order.count(7) == 4
    assert last <= 9, f"the polite key (7) gets every other batch, but its 4 stand so: {order}"


@pytest.mark.parametrize("path", ["/predict", "/classify", "/v1/audio/transcriptions"])
def test_a_flooding_key_is_refused_before_its_file_is_decoded(path: str, tmp_path: Path) -> None:
    model, file = colors(), png((250, 10, 10))
    if path.startswith("/v1/audio"):
        model, file = transcriber(tmp_path), wav(speech("ab"))
    with flooded(path, 3, model, send_file, file) as (server, gated, flood, _):
        assert send_file(server, path, FLOOD, b"no file").status_code == 429
        assert send_file(server, path, POLITE, b"no file").status_code == 400
        gated.open.set()
        assert [one.result().status_code for one in flood] == [200] * 4


def test_unknown_keys_are_refused_and_make_no_tenant() -> None:
    with live(double(), api_key=[FLOOD, POLITE]) as server:
        for at in range(30):
            assert ask(server, KSERVE, f"guess-{at}", 1).status_code == 401
        assert ask(server, KSERVE, FLOOD, 1).status_code == 200
        assert len(server.service.engines["double"].queue.tenants) == 1


@pytest.mark.parametrize("keys", [None, "secret", ["secret"]])
def test_with_one_key_or_none_there_is_one_tenant(keys: Any) -> None:
    with live(double(), api_key=keys) as server:
        for name in ("secret", "secret") if keys else ("secret", "other"):
            assert ask(server, KSERVE, name, 1).status_code == 200
        assert list(server.service.engines["double"].queue.tenants) == [""]


def test_simultaneous_requests_of_two_keys_are_two_queue_items() -> None:
    body = BODY.replace(b"1,2,3,4", b"%d,2,3,4")
    with live(double(max_batch=8), api_key=[FLOOD, POLITE]) as server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(6)]
        names = [FLOOD, POLITE] * 3
        entered: list[tuple[str, int]] = []
        engine = server.service.engines["double"]
        admit = engine.admission.admit_group

        def spy(item: Any, deadline: float) -> bool:
            entered.append((item.tenant, item.requests))
            return admit(item, deadline)

        for _ in range(3):  # the third time heads and template are known
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.admission, "admit_group", spy)
                for client in clients:
                    client.sendall(get(b"/v2/health/live"))
                    read(client, bytearray())
                with standing(server):
                    for at, (client, name) in enumerate(zip(clients, names, strict=True)):
                        client.sendall(send(body % at, b"X-Api-Key: " + name.encode()))
                answers = [read(client, bytearray()) for client in clients]
            assert [doubled(answer)[0] for answer in answers] == [0, 2, 4, 6, 8, 10]
    assert [requests for _, requests in entered[-2:]] == [3, 3]
    assert len({tenant for tenant, _ in entered[-2:]}) == 2
