"""KServe v2: tensors in JSON and raw bytes, metadata, statistics, and everything that must be refused."""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from infer.serve.api import kserve
from infer.serve.api.kserve.kserve_types import InferResponse
from infer.serve.limits import ServeLimits
from tests.support.fake_predictors import Fake, Live, double, echo, embedder, live

SPLIT = "Inference-Header-Content-Length"
NUMPY = {
    "float64": "FP64",
    "float32": "FP32",
    "float16": "FP16",
    "int64": "INT64",
    "int32": "INT32",
    "int16": "INT16",
    "int8": "INT8",
    "uint8": "UINT8",
    "bool": "BOOL",
}


def nan_maker() -> Fake:
    fake = double("nan")
    fake.function = lambda inputs: {
        "y": inputs["x"] * np.float32("nan"),
        "rows": np.zeros(len(inputs["x"]), int),
    }
    return fake


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    models = [double(), embedder(), nan_maker(), *map(echo, [*NUMPY, "bfloat16"])]
    limits = ServeLimits(max_body_bytes=1 << 20, max_queue_rows=100)
    with live(*models, limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def x(*values: float, **more: Any) -> dict[str, Any]:
    data = [value for value in values for _ in range(4)]
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(values), 4], "data": data}], **more}


def still_well(client: httpx.Client) -> None:
    assert client.get("/v2/health/ready").json() == {"ready": True}
    answer = client.post("/v2/models/double/infer", json=x(21)).json()
    assert answer["outputs"][0]["data"] == [42.0] * 4


def refused(
    client: httpx.Client, body: bytes | dict[str, Any], *, words: str = "", status: int = 400, **more: Any
) -> str:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = more.pop("path", "/v2/models/double/infer")
    answer = client.post(path, content=content, **more)
    assert answer.status_code == status, answer.text
    text = answer.json()
    assert list(text) == ["error"]
    assert words in text["error"]
    still_well(client)
    return text["error"]


def test_server_and_model_metadata(client: httpx.Client) -> None:
    assert client.get("/v2").json()["extensions"] == kserve.EXTENSIONS
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/double/ready").json() == {"name": "double", "ready": True}
    assert client.get("/v2/models/double/versions/1").json() == {
        "name": "double",
        "versions": ["1"],
        "platform": "infer_fake",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "rows", "datatype": "INT64", "shape": [-1]},
        ],
    }
    config = client.get("/v2/models/double/config").json()
    assert config["max_batch_size"] == 8
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    assert {"name": "double", "version": "1", "state": "READY"} in client.get("/v2/models").json()["models"]


def test_inference_response_has_timings_and_id(client: httpx.Client) -> None:
    answer = client.post("/v2/models/double/versions/1/infer", json=x(1, 2, id="mine"))
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert (body["model_name"], body["model_version"], body["id"]) == ("double", "1", "mine")
    assert set(body["parameters"]) == {"queue_us", "compute_us", "batch_size"}
    assert body["outputs"][0] == {
        "name": "y",
        "datatype": "FP32",
        "shape": [2, 4],
        "data": [2.0] * 4 + [4.0] * 4,
    }
    msgspec.convert(body, InferResponse)


def test_nested_data_equals_flat_data(client: httpx.Client) -> None:
    body = x(1, 2)
    body["inputs"][0]["data"] = [[1, 1, 1, 1], [2, 2, 2, 2]]
    assert client.post("/v2/models/double/infer", json=body).json()["outputs"][0]["data"][4] == 4.0


def test_only_requested_outputs_are_returned_in_order(client: httpx.Client) -> None:
    body = x(1, outputs=[{"name": "rows"}, {"name": "y", "parameters": {"binary_data": True}}])
    answer = client.post("/v2/models/double/infer", json=body)
    head = int(answer.headers[SPLIT])
    outputs = json.loads(answer.content[:head])["outputs"]
    assert [o["name"] for o in outputs] == ["rows", "y"]
    assert outputs[1]["parameters"] == {"binary_data_size": 16}
    assert np.frombuffer(answer.content[head:], "<f4").tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", NUMPY)
def test_every_datatype_survives_in_raw_bytes(client: httpx.Client, dtype: str) -> None:
    values = np.array([[1, 0, 1], [0, 1, 1]]).astype(dtype)
    if values.dtype.kind == "f":
        values[0] = [np.nan, -0.0, np.inf]
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "datatype": NUMPY[dtype],
                    "shape": [2, 3],
                    "parameters": {"binary_data_size": values.nbytes},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    answer = client.post(
        f"/v2/models/{dtype}/infer", content=head + values.tobytes(), headers={SPLIT: str(len(head))}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content[int(answer.headers[SPLIT]) :] == values.tobytes()


@pytest.mark.parametrize("dtype", sorted(set(NUMPY) - {"float16"}))
def test_every_datatype_but_fp16_survives_in_json(client: httpx.Client, dtype: str) -> None:
    data = [True, False] if dtype == "bool" else [1, 0]
    body = {"inputs": [{"name": "x", "datatype": NUMPY[dtype], "shape": [1, 2], "data": data}]}
    answer = client.post(f"/v2/models/{dtype}/infer", json=body)
    assert answer.json()["outputs"][0]["data"] == data


def test_bfloat16_survives_in_raw_bytes(client: httpx.Client) -> None:
    bits = np.array([0x3F80, 0x4000], "<u2").tobytes()
    answer = client.post("/v2/models/bfloat16/infer", content=bits, headers={SPLIT: "0"})
    head = int(answer.headers[SPLIT])
    assert json.loads(answer.content[:head])["outputs"][0]["datatype"] == "BF16"
    assert answer.content[head:] == bits


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_floats_in_json_are_refused_both_ways(client: httpx.Client, dtype: str) -> None:
    name = "FP16" if dtype == "float16" else "BF16"
    given = {"name": "x", "datatype": name, "shape": [1, 2], "data": [1, 2]}
    binary = {"inputs": [given], "parameters": {"binary_data_output": True}}
    refused(client, binary, words="can't be written in JSON", path=f"/v2/models/{dtype}/infer")
    refused(client, {"inputs": [given]}, words="JSON can't carry", path=f"/v2/models/{dtype}/infer")


def test_a_body_of_raw_bytes_alone_is_the_only_input(client: httpx.Client) -> None:
    raw = np.arange(8, dtype="<f4").tobytes()
    answer = client.post("/v2/models/double/infer", content=raw, headers={SPLIT: "0"})
    head = int(answer.headers[SPLIT])
    outputs = json.loads(answer.content[:head])["outputs"]
    assert outputs[0]["shape"] == [2, 4]
    assert np.frombuffer(answer.content[head : head + 32], "<f4").tolist() == [2.0 * i for i in range(8)]
    refused(client, raw[:-1], headers={SPLIT: "0"})
    refused(client, b"", headers={SPLIT: "0"}, path="/v2/models/embedder/infer", words="one input")


def test_nonfinite_values_are_strings_and_counted(client: httpx.Client) -> None:
    answer = client.post("/v2/models/nan/infer", json=x(1))
    assert answer.json()["outputs"][0]["data"] == ["NaN"] * 4
    json.loads(answer.content, parse_constant=pytest.fail)
    assert 'infer_nonfinite_outputs_total{model="nan",version="1"} 4.0' in client.get("/metrics").text


def test_text_input_as_bytes_keeps_row_order(client: httpx.Client) -> None:
    texts = ["a", "a much longer text than the others are", "bb", "ü"]
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [4], "data": texts}]}
    answer = client.post("/v2/models/embedder/infer", json=body).json()
    expected = embedder().embed(texts)
    assert answer["outputs"][0]["data"] == expected.ravel().tolist()
    raw = b"".join(len(t.encode()).to_bytes(4, "little") + t.encode() for t in texts)
    given = {
        "name": "text",
        "datatype": "BYTES",
        "shape": [4, 1],
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"inputs": [given]}).encode()
    binary = client.post("/v2/models/embedder/infer", content=head + raw, headers={SPLIT: str(len(head))})
    assert binary.json()["outputs"][0]["data"] == expected.ravel().tolist()


@pytest.mark.parametrize("shape", [[1], [3]])
def test_inconsistent_text_bytes_are_refused(client: httpx.Client, shape: list[int]) -> None:
    raw = (9).to_bytes(4, "little") + b"ab" if shape == [1] else (2).to_bytes(4, "little") + b"ab"
    given = {
        "name": "text",
        "datatype": "BYTES",
        "shape": shape,
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"inputs": [given]}).encode()
    headers = {SPLIT: str(len(head))}
    refused(client, head + raw, path="/v2/models/embedder/infer", headers=headers)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"inputs": NaN}', "JSON"),
        (b'{"inputs": [Infinity]}', "JSON"),
        (b'{"inputs": [1e999]}', "out of range"),
        (b'{"inputs": ["\xff"]}', "UTF-8"),
        (b'{"id": "\\ud800", "inputs": []}', "surrogate"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b'{"inputs": [], "inputs": []}', "duplicate key"),
        (b'{"inputs": [], "a": {"b:": 1, "b:": 2}}', "duplicate key"),
        (b'{"inputs": [], "\\u0061": 1, "a": 2}', "duplicate key"),
        (b'{"inputs": [], "a": [1, {"b": 1, "b": 2}]}', "duplicate key"),
        (b'{"inputs": [], "inputs": [], "a": "\\u003a"}', "duplicate key"),
        (b"[" * 100_000, "deeper"),
        (b'{"a":' * 100_000, "deeper"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b', "inputs": []}', "deeper"),
        (b'{"inputs": ' + b"9" * 5000 + b"}", "range"),
        (b"{}", "inputs"),
        (b'{"inputs": []}', "missing input 'x'"),
        (b'{"inputs": [{"name": "x"}]}', "datatype"),
    ],
)
def test_malformed_request_bodies_are_refused(client: httpx.Client, body: bytes, words: str) -> None:
    refused(client, body, words=words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "z"}, "expected 'x' float32 [batch, 4]"),
        ({"datatype": "FP64"}, "expected FP32"),
        ({"datatype": "nonsense"}, "expected FP32"),
        ({"shape": [1, 5]}, "elements, the data has shape"),
        ({"shape": [2, 4]}, "elements, the data has shape"),
        ({"shape": [4]}, "expected input 'x'"),
        ({"shape": [-1, 4]}, ">= 0"),
        ({"shape": [True, 4]}, "bool"),
        ({"shape": [1.5, 4]}, "float"),
        ({"shape": [2**61, 4]}, "elements, the data has shape"),
        ({"shape": [1] * 17}, "length"),
        ({"shape": [0, 4], "data": []}, "between 1 and 8"),
        ({"data": [1, 2, 3]}, "elements, the data has shape"),
        ({"data": [1, 2, 3, "4"]}, "expected FP32 values"),
        ({"data": [1, 2, 3, True]}, "expected FP32 values"),
        ({"data": [1, 2, 3, None]}, "expected FP32 values"),
        ({"data": [1, 2, 3, 1e39]}, "does not fit"),
        ({"data": [1, 2, 3, 10**400]}, "range"),
        ({"data": [[1, 2], [3]]}, "expected numbers"),
        ({"data": [[1, 2], [3, 4]]}, "elements, the data has shape"),
        ({"data": 5}, "Expected `array`"),
        ({"parameters": {"binary_data_size": 16}}, "given twice"),
        ({"parameters": {"shared_memory_region": "r"}}, "not supported"),
    ],
)
def test_tensors_that_do_not_match_the_model_are_refused(
    client: httpx.Client, change: dict[str, Any], words: str
) -> None:
    body = x(1)
    body["inputs"][0] |= change
    refused(client, body, words=words)


@pytest.mark.parametrize(
    ("dtype", "data", "words"),
    [
        ("int8", [128], "does not fit"),
        ("uint8", [-1], "does not fit"),
        ("int64", [2**63], "INT64"),
        ("int32", [1.0], "expected INT32"),
        ("bool", [1], "expected BOOL"),
    ],
)
def test_numbers_are_never_wrapped_or_rounded(
    client: httpx.Client, dtype: str, data: list[Any], words: str
) -> None:
    given = {"name": "x", "datatype": NUMPY[dtype], "shape": [1, 1], "data": data}
    refused(client, {"inputs": [given]}, words=words, path=f"/v2/models/{dtype}/infer")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"outputs": [{"name": "nope"}]}, "expected each of y, rows"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "at most once"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, "not supported"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "true or false"),
        ({"parameters": {"sequence_id": 1}}, "sequence_id is not supported"),
        ({"parameters": {"timeout": -1}}, "timeout"),
        ({"parameters": {"timeout": "1"}}, "timeout"),
        ({"parameters": {"priority": True}}, "priority"),
        ({"id": 5}, "Expected `str | null`"),
    ],
)
def test_unsupported_parameters_are_refused(client: httpx.Client, more: dict[str, Any], words: str) -> None:
    refused(client, x(1, **more), words=words)


@pytest.mark.parametrize("header", ["-1", "abc", "9" * 30, "100000", "٣".encode().decode("latin-1")])
def test_a_header_length_outside_the_body_is_refused(client: httpx.Client, header: str) -> None:
    refused(client, x(1), headers={SPLIT: header.encode("latin-1")}, words="the length of the body")


@pytest.mark.parametrize(("size", "extra"), [(16, b""), (15, b""), (2**62, b""), (16, b"more")])
def test_raw_bytes_must_add_up(client: httpx.Client, size: int, extra: bytes) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [given]}).encode()
    raw = bytes(16 if extra else 12) + extra
    refused(client, head + raw, headers={SPLIT: str(len(head))})


def test_a_bool_byte_must_be_zero_or_one(client: httpx.Client) -> None:
    given = {"name": "x", "datatype": "BOOL", "shape": [1, 2], "parameters": {"binary_data_size": 2}}
    head = json.dumps({"inputs": [given]}).encode()
    refused(client, head + b"\x01\x02", headers={SPLIT: str(len(head))}, path="/v2/models/bool/infer")


def test_the_header_of_a_pure_json_body_may_be_its_whole_length(client: httpx.Client) -> None:
    body = json.dumps(x(3)).encode()
    answer = client.post("/v2/models/double/infer", content=body, headers={SPLIT: str(len(body))})
    assert answer.json()["outputs"][0]["data"] == [6.0] * 4


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_inflated(client: httpx.Client, encoding: str) -> None:
    squeeze = gzip.compress if encoding == "gzip" else zlib.compress
    headers = {"Content-Encoding": encoding}
    body = squeeze(json.dumps(x(3)).encode())
    assert client.post("/v2/models/double/infer", content=body, headers=headers).status_code == 200
    refused(client, body[:-3], headers=headers, words="truncated")
    refused(client, body + b"tail", headers=headers)
    refused(client, b"not compressed", headers=headers, words="expected a valid")
    refused(client, squeeze(b" " * (2 << 20)), headers=headers, status=413)
    refused(client, body, headers={"Content-Encoding": "br"}, status=415)


@pytest.mark.parametrize("chunked", [False, True])
def test_body_above_the_limit_returns_413_readably(client: httpx.Client, chunked: bool) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    content: Any = chunks() if chunked else b" " * (2 << 20)
    answer = client.post("/v2/models/double/infer", content=content)
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"
    still_well(client)


@pytest.mark.parametrize("path", ["nope", "double/versions/2", "..%2F..%2Fetc", "%00"])
def test_unknown_models_and_versions_return_404_without_echo(client: httpx.Client, path: str) -> None:
    text = refused(client, x(1), path=f"/v2/models/{path}/infer", status=404)
    assert "etc" not in text


def test_rows_beyond_a_batch_are_split_beyond_the_queue_refused(client: httpx.Client) -> None:
    answer = client.post("/v2/models/double/infer", json=x(*range(20))).json()
    assert answer["outputs"][0]["data"][::4] == [2.0 * i for i in range(20)]
    refused(client, x(*range(101)), status=413, words="100 rows")


def test_model_error_returns_500_with_request_id_only(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.post("/v2/models/double/infer", json=x(666), headers={"X-Request-Id": "find-me"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "find-me" in answer.json()["error"]
    assert "the secret of the model's insides" in caplog.text
    still_well(client)


def test_statistics_match_triton_semantics(client: httpx.Client) -> None:
    def stats() -> dict[str, Any]:
        return client.get("/v2/models/double/versions/1/stats").json()["model_stats"][0]

    before = stats()
    for _ in range(3):
        client.post("/v2/models/double/infer", json=x(1, 2))
    after = stats()
    assert after["version"] == "1"
    assert after["inference_count"] - before["inference_count"] == 6
    assert after["execution_count"] - before["execution_count"] == 3
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"] == 3
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    assert after["last_inference"] > 1.7e12
    assert "batch_size" in after["batch_stats"][0]
    assert len(client.get("/v2/models/stats").json()["model_stats"]) >= 10


def test_timeout_parameter_in_microseconds_is_enforced() -> None:
    with live(double(seconds=0.3)) as server, httpx.Client(base_url=server.url) as client:
        answer = client.post("/v2/models/double/infer", json=x(1, parameters={"timeout": 20_000}))
        assert answer.status_code == 504
        headers = {"X-Request-Timeout-Ms": "20"}
        answer = client.post("/v2/models/double/infer", json=x(1), headers=headers)
        assert answer.status_code in (503, 504)
        bad = client.post("/v2/models/double/infer", json=x(1), headers={"X-Request-Timeout-Ms": "soon"})
        assert bad.status_code == 400
        assert client.post("/v2/models/double/infer", json=x(1)).status_code == 200


def test_overload_returns_503_with_retry_after_and_serves_admitted() -> None:
    gate, entered = threading.Event(), threading.Event()
    fake = double(max_batch=1)

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        assert gate.wait(60)
        return {"y": inputs["x"] * 2, "rows": np.zeros(1, np.int64)}

    fake.function = run
    statuses: list[int] = []
    with live(fake, limits=ServeLimits(max_queue_requests=1)) as server:

        def post() -> None:
            answer = httpx.post(f"{server.url}/v2/models/double/infer", json=x(1), timeout=60)
            statuses.append(answer.status_code)

        threads = [threading.Thread(target=post) for _ in range(2)]
        threads[0].start()
        assert entered.wait(60)
        threads[1].start()
        engine = server.service.engines["double"]
        while engine.queue.requests < 1:
            time.sleep(0.005)
        for _ in range(10):
            answer = httpx.post(f"{server.url}/v2/models/double/infer", json=x(1), timeout=60)
            assert answer.status_code == 503
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        gate.set()
        for thread in threads:
            thread.join()
    assert statuses == [200, 200]
