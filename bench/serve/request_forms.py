"""Requests of the server benchmarks as raw HTTP, the forms of each server, and the result in its answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

JSON = "Content-Type: application/json"
TOGETHER = 12  # requests that are checked at once: batching is checked too, and none is refused
Answer = Callable[[Mapping[str, str], bytes], np.ndarray]


def post(path: str, body: Any, *headers: str) -> bytes:
    """Return an HTTP request; a body that is not bytes is sent as JSON."""
    if not isinstance(body, bytes):
        body, headers = json.dumps(body).encode(), (JSON, *headers)
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def encode(name: str, arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Encode one request of KServe in JSON and binary."""
    from infer.serve.api.kserve.kserve_tensors import DATATYPES

    path = f"/v2/models/{name}/infer"
    inputs = [
        {"name": n, "datatype": DATATYPES[str(a.dtype)][0], "shape": list(a.shape)} for n, a in arrays.items()
    ]
    values = list(arrays.values())
    plain = [{**i, "data": a.ravel().tolist()} for i, a in zip(inputs, values, strict=True)]
    sized = [{**i, "parameters": {"binary_data_size": a.nbytes}} for i, a in zip(inputs, values, strict=True)]
    head = json.dumps({"inputs": sized, "parameters": {"binary_data_output": True}}).encode()
    raw = head + b"".join(a.tobytes() for a in values)
    return {
        "json": post(path, {"inputs": plain}),
        "binary": post(path, raw, f"Inference-Header-Content-Length: {len(head)}"),
    }


def from_json(_: Mapping[str, str], body: bytes) -> np.ndarray:
    """Return the first output of an answer of KServe in JSON, flat."""
    return np.asarray(json.loads(body)["outputs"][0]["data"], np.float32).ravel()


def from_binary(headers: Mapping[str, str], body: bytes) -> np.ndarray:
    """Return the first output of a binary answer of KServe, flat."""
    size = int(headers["inference-header-content-length"])
    first = json.loads(body[:size])["outputs"][0]
    return np.frombuffer(body[size : size + first["parameters"]["binary_data_size"]], "<f4")


KSERVE: dict[str, Answer] = {"json": from_json, "binary": from_binary}


def answers(port: int, requests: Sequence[bytes], read: Answer) -> list[np.ndarray]:
    """Send requests, several together, and return their results. Raises `SystemExit` where one is refused."""

    def ask(request: bytes) -> np.ndarray:
        head, _, body = request.partition(b"\r\n\r\n")
        lines = [line.split(": ") for line in head.decode().split("\r\n")[2:]]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", head.split(b" ")[1].decode(), body, dict(lines))
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"port {port} answers {answer.status}: {text[:300]!r}")
        return read({name.lower(): value for name, value in answer.getheaders()}, text)

    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(ask, requests))


def largest_error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest relative error of a result, 1 for one of another size."""
    pairs = [(a.ravel(), b.ravel()) for a, b in zip(found, expected, strict=True)]
    return max(
        float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-9)) if a.size == b.size else 1.0
        for a, b in pairs
    )


def check(port: int, form: str, requests: Sequence[bytes], expected: Sequence[np.ndarray]) -> None:
    """Refuse to time a server of KServe whose answers differ from the model's."""
    error = largest_error(answers(port, requests, KSERVE[form]), expected)
    if not error < 1e-3:
        raise SystemExit(f"{form}: the server's answer is not the model's (relative error {error:.2e})")


@dataclass(frozen=True)
class Form:
    """`request`: the HTTP request for one tensor or one text; `answer`: its vector, from headers and body."""

    request: Callable[[Any], bytes]
    answer: Answer


def _json(path: str, ask: Callable[[Any], Any], read: Callable[[Any], Any]) -> Form:
    return Form(
        lambda value: post(path, ask(value)),
        lambda _, body: np.asarray(read(json.loads(body)), np.float32).ravel(),
    )


def _kserve_text(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]}


NOOP_FORMS = {
    "infer": Form(lambda x: encode("noop", {"x": x[None]})["json"], from_json),
    "infer-binary": Form(lambda x: encode("noop", {"x": x[None]})["binary"], from_binary),
    "litserve": _json("/predict", lambda x: {"x": x.tolist()}, lambda got: got["y"]),
    "bentoml": _json("/predict", lambda x: {"x": [x.tolist()]}, lambda got: got),
    "mosec": _json("/inference", lambda x: {"x": x.tolist()}, lambda got: got["y"]),
    "mosec-binary": Form(
        lambda x: post("/inference", x.tobytes(), "Content-Type: application/octet-stream"),
        lambda _, body: np.frombuffer(body, np.float32),
    ),
}
EMBED = {
    "infer": _json("/v2/models/minilm/infer", _kserve_text, lambda got: got["outputs"][0]["data"]),
    "litserve": _json("/predict", lambda text: {"text": text}, lambda got: got["y"]),
    "bentoml": _json("/predict", lambda text: {"texts": [text]}, lambda got: got),
    "mosec": _json("/inference", lambda text: {"text": text}, lambda got: got["embedding"]),
}
