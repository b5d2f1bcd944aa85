"""NVIDIA's tritonclient against a live server, over HTTP and gRPC, from an environment of its own, made once and kept.

`INFER_TEST_ENVIRONMENTS` names another place for it; without a network and without that folder the test is skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.fake_predictors import Live, double, embedder, live
from tests.support.own_environment import interpreter

pytestmark = pytest.mark.slow
NEEDS = ["tritonclient[grpc,http]==2.73.0", "ml-dtypes<=0.5.4", "greenlet<3.4", "numpy"]

CLIENT = """
import json, sys
import ml_dtypes
import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient(sys.argv[1])
seen = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model": client.is_model_ready("double"),
    "version": client.is_model_ready("double", "1"),
    "nope": client.is_model_ready("nope"),
    "metadata": client.get_model_metadata("double")["inputs"],
    "config": client.get_model_config("double")["max_batch_size"],
    "extensions": client.get_server_metadata()["extensions"],
}
values = np.arange(8, dtype=np.float32).reshape(2, 4)

def ask(binary_in, binary_out, **options):
    given = triton.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(values, binary_data=binary_in)
    outputs = None
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput(n, binary_data=binary_out) for n in ("y", "rows")]
    answer = client.infer("double", [given], outputs=outputs, request_id="me", **options)
    assert answer.get_response()["id"] == "me"
    return [answer.as_numpy("y").tolist(), answer.as_numpy("rows").tolist()]

seen["answers"] = [ask(i, o) for i in (True, False) for o in (True, False, None)]
seen["squeezed"] = [ask(True, True, request_compression_algorithm=a) for a in ("gzip", "deflate")]
seen["patient"] = ask(True, True, priority=1, timeout=5_000_000)
text = triton.InferInput("text", [2], "BYTES")
text.set_data_from_numpy(np.array(["abc", "d"], dtype=object), binary_data=True)
seen["embedding"] = client.infer("embedder", [text]).as_numpy("embedding").tolist()
half = triton.InferInput("x", [1, 2], "BF16")
half.set_data_from_numpy(np.array([[1.5, -2.0]], dtype=ml_dtypes.bfloat16), binary_data=True)
seen["bfloat16"] = client.infer("half", [half]).as_numpy("y").astype(np.float32).tolist()
stats = client.get_inference_statistics("double")["model_stats"][0]
seen["stats"] = stats["inference_stats"]["success"]["count"]
errors = []
for name, shape in (("nope", [2, 4]), ("double", [4, 2])):
    given = triton.InferInput("x", shape, "FP32")
    given.set_data_from_numpy(values.reshape(shape))
    try:
        client.infer(name, [given])
    except triton.InferenceServerException as error:
        errors.append([error.status(), error.message()])
seen["errors"] = errors
client.close()
print(json.dumps(seen))
"""

RPC = """
import json, queue, sys
import ml_dtypes
import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1])
seen = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model": client.is_model_ready("double", "1"),
    "nope": client.is_model_ready("nope"),
    "metadata": client.get_model_metadata("double", as_json=True)["inputs"],
    "config": client.get_model_config("double").config.max_batch_size,
    "extensions": list(client.get_server_metadata().extensions),
}
values = np.arange(8, dtype=np.float32).reshape(2, 4)

def tensors(scale=1):
    given = triton.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(values * np.float32(scale))
    return [given]

def read(answer):
    return [answer.as_numpy("y").tolist(), answer.as_numpy("rows").tolist()]

asked = [triton.InferRequestedOutput(n) for n in ("y", "rows")]
whole = dict(outputs=asked, request_id="me", priority=1, timeout=5_000_000, client_timeout=30)
answer = client.infer("double", tensors(), **whole)
assert answer.get_response().id == "me"
more = [client.infer("double", tensors(), compression_algorithm=c) for c in (None, "gzip", "deflate")]
seen["answers"] = [read(one) for one in (answer, *more)]
answered = queue.Queue()
client.async_infer("double", tensors(), callback=lambda result, error: answered.put((result, error)))
result, error = answered.get(timeout=30)
assert error is None, error
seen["answers"].append(read(result))
client.start_stream(callback=lambda result, error: answered.put((result, error)))
for number in range(20):
    client.async_stream_infer("nope" if number == 7 else "double", tensors(number), request_id=str(number))
streamed = [answered.get(timeout=30) for _ in range(20)]
client.stop_stream()
seen["stream"] = [
    str(error) if error else [result.get_response().id, result.as_numpy("y")[1, 3].item()]
    for result, error in streamed
]
text = triton.InferInput("text", [2], "BYTES")
text.set_data_from_numpy(np.array(["abc", "d"], dtype=object))
seen["embedding"] = client.infer("embedder", [text]).as_numpy("embedding").tolist()
half = triton.InferInput("x", [1, 2], "BF16")
half.set_data_from_numpy(np.array([[1.5, -2.0]], dtype=ml_dtypes.bfloat16))
seen["bfloat16"] = client.infer("half", [half]).as_numpy("y").astype(np.float32).tolist()
seen["stats"] = client.get_inference_statistics("double").model_stats[0].inference_stats.success.count

def refused(call, *arguments):
    try:
        call(*arguments)
    except triton.InferenceServerException as error:
        return [error.status(), error.message()]

wrong = triton.InferInput("x", [4, 2], "FP32")
wrong.set_data_from_numpy(values.reshape(4, 2))
seen["errors"] = [
    refused(client.infer, "nope", tensors()),
    refused(client.infer, "double", [wrong]),
    refused(client.register_system_shared_memory, "r", "/r", 8),
    refused(client.get_trace_settings),
    refused(client.get_model_repository_index),
]
client.close()
print(json.dumps(seen))
"""

# Ours against Triton's own descriptors, in an environment with another version of protobuf than ours.
SCHEMA = """
import importlib.util, pathlib, sys
from tritonclient.grpc import model_config_pb2, service_pb2

spec = importlib.util.spec_from_file_location("schema", sys.argv[1])
schema = importlib.util.module_from_spec(spec)
spec.loader.exec_module(schema)

def fields(message):
    found = {}
    for field in message.fields:
        kind = field.message_type or field.enum_type
        found[field.number] = (field.name, field.type, field.is_repeated, kind and kind.name)
    return found

compared = 0
for name, ours in schema.message_classes(pathlib.Path(sys.argv[1]).with_name("kserve.proto")).items():
    theirs = getattr(service_pb2, name, None) or getattr(model_config_pb2, name)
    pairs = [(ours.DESCRIPTOR, theirs.DESCRIPTOR)]
    pairs += [(one, theirs.DESCRIPTOR.nested_types_by_name[one.name]) for one in ours.DESCRIPTOR.nested_types]
    for mine, other in pairs:
        assert fields(mine).items() <= fields(other).items(), (name, fields(mine), fields(other))
        compared += len(mine.fields)
print(compared)
"""


@pytest.fixture(scope="module")
def python() -> str:
    return str(interpreter("tritonclient-2.73.0-grpc", NEEDS))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    from tests.support.fake_predictors import echo

    half = echo("bfloat16")
    half.change(name="half")
    with live(double(), embedder(), half, rpc=True) as server:
        yield server


def test_tritonclient_infers_and_gets_expected_errors(python: str, server: Live) -> None:
    command = [python, "-c", CLIENT, f"{server.host}:{server.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [seen[name] for name in ("live", "ready", "model", "version", "nope")] == [True] * 4 + [False]
    assert seen["metadata"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert seen["config"] == 8
    assert "binary_tensor_data" in seen["extensions"]
    expected = [[[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0]], [0, 1]]
    assert seen["answers"] == [expected] * 6
    assert seen["squeezed"] == [expected] * 2
    assert seen["patient"] == expected
    assert seen["embedding"] == embedder().embed(["abc", "d"]).tolist()
    assert seen["bfloat16"] == [[1.5, -2.0]]
    assert seen["stats"] >= 9
    assert [status for status, _ in seen["errors"]] == ["404", "400"]
    assert "shape" not in seen["errors"][0][1]
    assert "[batch, 4]" in seen["errors"][1][1]


def test_tritonclients_grpc_infers_and_gets_expected_errors(python: str, server: Live) -> None:
    done = subprocess.run(
        [python, "-c", RPC, server.rpc], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [seen[name] for name in ("live", "ready", "model", "nope")] == [True] * 3 + [False]
    assert seen["metadata"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "4"]}]
    assert seen["config"] == 8
    assert "binary_tensor_data" in seen["extensions"]
    assert seen["answers"] == [[[[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0]], [0, 1]]] * 5
    assert [one for i, one in enumerate(seen["stream"]) if i != 7] == [
        [str(i), 14.0 * i] for i in range(20) if i != 7
    ]
    assert "no such model" in seen["stream"][7]
    assert seen["embedding"] == embedder().embed(["abc", "d"]).tolist()
    assert seen["bfloat16"] == [[1.5, -2.0]]
    assert seen["stats"] >= 24
    codes = ["NOT_FOUND", "INVALID_ARGUMENT", *["UNIMPLEMENTED"] * 3]
    assert [status for status, _ in seen["errors"]] == [f"StatusCode.{code}" for code in codes]
    texts = "no such model", "[batch, 4]", "shared memory", "settings", "--allow-reload"
    assert all(words in text for words, (_, text) in zip(texts, seen["errors"], strict=True))


def test_the_schema_has_tritons_numbers_and_types(python: str) -> None:
    from infer.serve.grpc import schema

    done = subprocess.run(
        [python, "-c", SCHEMA, schema.__file__], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
