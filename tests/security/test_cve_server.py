"""Incidents of other servers, tried on this one; each ends with a health check and a right answer."""

from __future__ import annotations

import builtins
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.errors import InferError
from tests.support import raw_http
from tests.support.fake_predictors import Live, live
from tests.support.raw_http import GOOD, ask, connect, get, post, read, send


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(*raw_http.models(tmp_path_factory.mktemp("cve")), limits=raw_http.LIMITS) as server:
        yield server


@pytest.fixture(autouse=True)
def still_well(server: Live) -> Iterator[None]:
    yield
    raw_http.well(server)


def completion(server: Live, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    body = {"model": "fake_llm", "prompt": "hi", "max_tokens": 2, **fields}
    return httpx.post(server.url + path, json=body)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize(
    "path",
    [
        "/models",
        "/models?url=http://127.0.0.1:1/m.mar",
        "/v2/repository/models/x/load",
        "/v2/repository/index",
    ]
    + ["/v1/load_lora_adapter", "/api/pull", "/management/models"],
)
def test_cve_2023_43654_no_route_loads_a_model(server: Live, method: str, path: str) -> None:
    assert httpx.request(method, server.url + path).status_code in (401, 403, 404, 405)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/m.infer", "https://localhost/m.pt", "file:///etc/passwd", "s3://b/m"]
)
def test_cve_2024_35198_a_url_is_no_model(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from infer import Predictor

    def never(*arguments: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", never)
    with pytest.raises(InferError):
        Predictor.load(url)


PATHS = [
    "../../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1:1/x",
    "..\\..\\x",
    "sha256:../x",
]


@pytest.mark.parametrize("path", PATHS)
def test_cve_2024_37032_nothing_a_client_names_is_opened(
    server: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also CVE-2024-45436 and CVE-2026-103663, in which it came back: names, templates and images as paths."""
    opened: list[str] = []
    real_open, real_os_open, real_connect = builtins.open, os.open, socket.socket.connect

    def note(name: Any, *rest: Any, **more: Any) -> Any:
        opened.append(str(name))
        return real_open(name, *rest, **more)

    def note_os(name: Any, *rest: Any, **more: Any) -> Any:
        opened.append(str(name))
        return real_os_open(name, *rest, **more)

    def connect_to(one: Any, address: Any) -> Any:
        if address[1] != server.port:
            opened.append(str(address))
        return real_connect(one, address)

    monkeypatch.setattr(builtins, "open", note)
    monkeypatch.setattr(os, "open", note_os)
    monkeypatch.setattr(socket.socket, "connect", connect_to)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": path}}]}
    item = {"type": "input_image", "image_url": path}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": path}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    tensor = {"inputs": [{"name": path, "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    asked = [
        completion(server, model=path),
        completion(server, "/v1/chat/completions", model=path, **chat),
        completion(server, "/v1/chat/completions", messages=[image]),
        completion(server, "/v1/responses", input=[{"role": "user", "content": [item]}]),
        completion(server, "/v1/messages", messages=[{"role": "user", "content": [block]}], max_tokens=1),
        httpx.get(f"{server.url}/v1/responses/{path}"),
        completion(server, "/v1/chat/completions", chat_template=path, **chat),
        completion(server, "/v1/chat/completions", chat_template_kwargs={"chat_template": path}, **chat),
        httpx.get(f"{server.url}/v1/models/{path}"),
        httpx.get(f"{server.url}/v2/models/{path}/config"),
        httpx.get(f"{server.url}/page/{path}"),
        httpx.post(f"{server.url}/v2/models/double/infer", json=tensor),
    ]
    assert {answer.status_code for answer in asked} <= {400, 404}
    assert not [name for name in opened if "passwd" in name or "127.0.0.1" in name or name.endswith("x")]


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
def test_cve_2025_61620_templates_of_requests_are_never_rendered(server: Live, field: str) -> None:
    """Also CVE-2025-62426, CVE-2026-115911, CVE-2026-5760 and CVE-2024-34359."""
    attack = "{% for i in range(10**9) %}{% endfor %}{{ ''.__class__.__mro__ }}"
    value: Any = attack if field == "chat_template" else {"chat_template": attack}
    answer = completion(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **{field: value}
    )
    assert answer.status_code == 400
    assert "object" not in answer.text.replace("invalid_request", "")


def test_cve_2024_34359_a_model_s_own_template_runs_in_a_sandbox() -> None:
    from infer.llm.text.chat_template import ChatTemplate

    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('x') }}",
    ):
        template = ChatTemplate({"default": attack}, {})
        with pytest.raises(InferError):
            template.render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "fields",
    [{"n": 1 << 30}, {"n": 17}, {"logprobs": -1}, {"logprobs": 21}, {"stop": ["a"] * 17}]
    + [{"logit_bias": {str(i): 1 for i in range(1025)}}, {"best_of": 1 << 30}, {"prompt": ["a"] * 1025}],
)
def test_cve_2026_34756_counts_are_checked_before_anything_is_allocated(
    server: Live, fields: dict[str, Any]
) -> None:
    engine_client = server.service.generators["fake_llm"].engine_client
    before = engine_client._engine.steps if hasattr(engine_client, "_engine") else 0
    assert completion(server, **fields).status_code == 400
    assert (engine_client._engine.steps if hasattr(engine_client, "_engine") else 0) == before


def test_cve_2025_48956_a_huge_header_is_431(server: Live) -> None:
    assert ask(server, get(b"/health", b"X: " + b"a" * 4_000_000)).status == 431


def test_cve_2025_48944_a_bad_pattern_is_the_client_s_mistake(server: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string", "pattern": "("}}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    answers = [
        completion(server, structured_outputs={"regex": "("}),
        completion(server, "/v1/chat/completions", tools=[tool], **chat),
    ]
    assert answers[0].status_code == 422
    assert answers[1].status_code in (200, 400, 422)


@pytest.mark.parametrize("name", ["shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"])
def test_cve_2026_115912_shared_memory_is_never_named_by_a_client(server: Live, name: str) -> None:
    """Also CVE-2025-23319, -23320 and -23334, where an error told the name of the server's own."""
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {name: "/psm_secret"}}
    answer = httpx.post(f"{server.url}/v2/models/double/infer", json={"inputs": [given]})
    assert answer.status_code == 400
    assert "psm" not in answer.text
    wanted = {
        "inputs": [{**given, "parameters": {}, "data": [1, 2, 3, 4]}],
        "outputs": [{"name": "y", "parameters": {name: 1}}],
    }
    assert httpx.post(f"{server.url}/v2/models/double/infer", json=wanted).status_code in (200, 400)


def test_cve_2025_62164_a_torch_file_is_no_tensor(server: Live, tmp_path: Path) -> None:
    import torch

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"x": Payload()}, tmp_path / "evil.pt")
    raw = (tmp_path / "evil.pt").read_bytes()
    answer = ask(server, send(raw, b"Inference-Header-Content-Length: 0"))
    assert answer.status == 400
    assert not (tmp_path / "ran").exists()


def test_cve_2025_46570_ids_are_made_by_the_server(server: Live) -> None:
    """Also CVE-2026-105754 and its kin: what a client calls its request keys nothing; two may share a name."""
    body = json.dumps({"model": "fake_llm", "prompt": "hi", "max_tokens": 3}).encode()
    with connect(server) as one, connect(server) as other:
        for connection in (one, other):
            connection.sendall(send(body, b"X-Request-Id: same", path=b"/v1/completions"))
        answers = [json.loads(read(connection, bytearray()).body) for connection in (one, other)]
    assert answers[0]["id"] != answers[1]["id"]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_cve_2025_29770_an_error_of_one_request_is_its_own(server: Live) -> None:
    """Also vLLM #16529, #15041, #43920 and CVE-2026-105756: a biased token beyond the vocabulary killed the engine."""
    for fields in (
        {"logit_bias": {"999999999": 1}},
        {"stop_token_ids": [2**31 - 1]},
        {"prompt": [2**31 - 1]},
    ):
        assert completion(server, **fields).status_code == 400
    assert completion(server).status_code == 200


@pytest.mark.parametrize(
    "shape", [[2**60 + 2, 16], [2**62, 4], [2**31, 2**31, 4], [2**62 + 2**61, 0], [1 << 40, 4]]
)
def test_cve_2026_27940_sizes_do_not_overflow(server: Live, shape: list[int]) -> None:
    """Also CVE-2024-21802, CVE-2025-53630, CVE-2026-33298: one product of sizes, of Python's integers."""
    given = {"name": "x", "datatype": "FP32", "shape": shape}
    for extra in ({"data": [1, 2, 3, 4]}, {"parameters": {"binary_data_size": 16}}):
        body = json.dumps({"inputs": [{**given, **extra}]}).encode()
        answer = ask(server, send(body + bytes(16), b"Inference-Header-Content-Length: %d" % len(body)))
        assert answer.status == 400


@pytest.mark.parametrize(
    "name", ["a b", "a;id", "$(id)", "a\nb", "../a", "", "-a", "a" * 129, "a/b", "%2e%2e"]
)
def test_cve_2025_23316_a_model_s_name_is_letters_digits_and_a_few_signs(name: str) -> None:
    from infer.serve.limits import check_model_name

    with pytest.raises(InferError):
        check_model_name(name)


def test_cve_2025_23310_many_chunks_are_counted_not_stacked(server: Live) -> None:
    """Also CVE-2025-23311: memory on the stack for each chunk of a request."""
    assert ask(server, raw_http.chunked(*[b" "] * 600)).status == 400


@pytest.mark.parametrize("tail", [b"XX", b"\n\n", b"\r\r", b"\x00\x00"])
def test_cve_2025_43859_a_chunk_ends_with_crlf(server: Live, tail: bytes) -> None:
    inner = get(b"/v2/models/stats")
    body = b"3\r\nabc" + tail + b"%x\r\n" % len(inner) + inner + b"\r\n0\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(post(b"Transfer-Encoding: chunked", body=body) + GOOD)
        buffer = bytearray()
        assert read(connection, buffer).status == 400
        assert raw_http.closed(connection, 3)
        assert not buffer
