"""Request format of each server of `bench/serve/peers/comparison.py`, and the place of the result in its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.serve.closed_loop_client import encode, outputs_of, post

JSON = "Content-Type: application/json"
Answer = Callable[[Mapping[str, str], bytes], np.ndarray]


@dataclass(frozen=True)
class Form:
    """`request`: the HTTP request for one tensor or one text; `answer`: its vector, from headers and body."""

    request: Callable[[Any], bytes]
    answer: Answer


def _json(path: str, ask: Callable[[Any], Any], read: Callable[[Any], Any]) -> Form:
    return Form(
        lambda value: post(path, json.dumps(ask(value)).encode(), JSON),
        lambda _, body: np.asarray(read(json.loads(body)), np.float32).ravel(),
    )


def _kserve_text(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]}


def _split(headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return outputs_of("binary", "".join(f"\r\n{k}:{v}" for k, v in headers.items()).encode() + b"\r\n", body)


NOOP_FORMS = {
    "infer": Form(
        lambda x: encode("noop", {"x": x[None]})["json"],
        lambda _, body: np.asarray(json.loads(body)["outputs"][0]["data"], np.float32),
    ),
    "infer-binary": Form(lambda x: encode("noop", {"x": x[None]})["binary"], _split),
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
