"""KServe v2 over gRPC: the same answers, refusals, keys, deadlines, limits and counts as over REST."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from infer.cli import main
from infer.errors import UsageError
from infer.serve.api import kserve
from infer.serve.grpc.rpc_server import SERVICE, rpcs
from infer.serve.limits import ServeLimits
from infer.serve.options import ServeOptions
from infer.serve.ray_app import check
from tests.support.fake_predictors import Live, double, echo, embedder, live
from tests.support.kserve_clients import MESSAGES, Answer, Rest, Rpc, Tensor, clients
from tests.support.worker_models import serving, wait_until

LIMITS = ServeLimits(max_body_bytes=1 << 20, body_seconds=0.5, max_header_bytes=8192)
EIGHT = Tensor("x", "FP32", np.arange(8, dtype=np.float32).reshape(2, 4))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(double(), embedder(), echo("int8"), echo("bfloat16"), limits=LIMITS, rpc=True) as server:
        yield server


@pytest.fixture(scope="module")
def wires(server: Live) -> Iterator[dict[str, Any]]:
    with clients(server) as wires:
        yield wires


@pytest.fixture
def rpc(wires: dict[str, Any]) -> Rpc:
    client: Rpc = wires["gRPC"]
    return client


def doubled(rpc: Rpc) -> None:
    answer = rpc.infer("double", EIGHT, id="mine")
    assert (answer.status, answer.id) == (200, "mine")
    assert answer.outputs["y"].tolist() == (EIGHT.values * 2).tolist()
    assert set(answer.parameters) == {"queue_us", "compute_us", "batch_size"}


def counted(server: Live, code: int) -> int:
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("infer_requests_total")]
    lines = [line for line in lines if 'api="kserve_grpc"' in line and f'code="{code}"' in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


@pytest.mark.parametrize("typed", [True, False])
def test_tensors_travel_raw_and_typed(rpc: Rpc, typed: bool) -> None:
    x = Tensor("x", "FP32", EIGHT.values, typed=typed)
    assert rpc.infer("double", x).outputs["y"].tolist() == (EIGHT.values * 2).tolist()


def test_what_rest_says_of_server_and_models_grpc_says(wires: dict[str, Any]) -> None:
    for what, model in (("metadata", ""), ("metadata", "double"), ("config", "double")):
        rest, rpc = (wire.get(what, model).parameters for wire in wires.values())
        said = rpc["config"] if what == "config" else rpc
        for name, value in said.items():
            if name not in ("inputs", "outputs", "output", "input", "dynamic_batching"):
                assert rest[name] == value
        if what == "metadata" and model:
            assert [t["name"] for t in rpc["outputs"]] == [t["name"] for t in rest["outputs"]]
            assert rpc["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "4"]}]
    assert wires["gRPC"].get("metadata").parameters["extensions"] == kserve.EXTENSIONS


def test_health_is_a_flag_where_rest_has_a_status(rpc: Rpc) -> None:
    assert rpc.get("live").parameters == {"live": True}
    assert rpc.get("ready").parameters == {"ready": True}
    assert rpc.get("ready", "double").parameters == {"ready": True}
    unknown = rpc.get("ready", "nope")
    assert (unknown.status, unknown.parameters) == (200, {})


def test_statistics_count_both_wires(wires: dict[str, Any]) -> None:
    def success(wire: Rest | Rpc) -> int:
        (stats,) = wire.get("stats", "double").parameters["model_stats"]
        return int(stats["inference_stats"]["success"].get("count", 0))

    before = success(wires["REST"])
    for wire in wires.values():
        assert wire.infer("double", EIGHT).status == 200
    assert success(wires["REST"]) == success(wires["gRPC"]) == before + 2
    assert len(wires["gRPC"].get("stats").parameters["model_stats"]) == 4


REFUSED: dict[str, tuple[str, Tensor | list[Tensor], dict[str, Any], str]] = {
    "unknown model": ("nope", EIGHT, {}, "no such model"),
    "unknown version": ("double", EIGHT, {"version": "9"}, "only version 1"),
    "no input": ("double", [], {}, "x"),
    "wrong name": ("double", Tensor("z", "FP32", EIGHT.values), {}, "no such input"),
    "twice": ("double", [EIGHT, EIGHT], {}, "more than one"),
    "wrong datatype": ("double", Tensor("x", "FP64", EIGHT.values), {}, "expected FP32"),
    "wrong shape": ("double", Tensor("x", "FP32", EIGHT.values.reshape(4, 2)), {}, "[batch, 4]"),
    "wrong rank": ("double", Tensor("x", "FP32", EIGHT.values.ravel()), {}, "[batch, 4]"),
    "negative size": ("double", Tensor("x", "FP32", EIGHT.values, shape=[-1, 4]), {}, "0"),
    "too few bytes": ("double", Tensor("x", "FP32", EIGHT.values[0], shape=[2, 4]), {}, "32 bytes"),
    "unknown output": ("double", EIGHT, {"outputs": ["q"]}, "y, rows"),
    "classes": (
        "double",
        EIGHT,
        {"outputs": [{"name": "y", "parameters": {"classification": 2}}]},
        "classification",
    ),
    "shared input": (
        "double",
        Tensor("x", "FP32", EIGHT.values, parameters={"shared_memory_region": "r"}),
        {},
        "shared memory",
    ),
    "shared output": (
        "double",
        EIGHT,
        {"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
        "shared_memory_region",
    ),
    "timeout": ("double", EIGHT, {"parameters": {"timeout": -1}}, "timeout"),
    "sequence without state": ("double", EIGHT, {"parameters": {"sequence_id": 3}}, "no state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_both_wires_refuse_alike_with_one_text(wires: dict[str, Any], case: str) -> None:
    model, tensors, more, words = REFUSED[case]
    given = tensors if isinstance(tensors, list) else [tensors]
    rest, rpc = (wire.infer(model, *given, **more) for wire in wires.values())
    assert rest.status == rpc.status != 200
    assert words in rpc.error
    if "size" not in case:  # JSON names the place in its document
        assert rest.error == rpc.error
    doubled(wires["gRPC"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.raw_input_contents.append(b""), "raw_input_contents of 1"),
        (lambda m: m.inputs[0].contents.fp32_contents.append(1), "given twice"),
        (lambda m: m.parameters["empty"].SetInParent(), "no value"),
        (lambda m: m.ClearField("raw_input_contents"), "no data"),
    ],
)
def test_contents_that_contradict_are_refused(rpc: Rpc, change: Any, words: str) -> None:
    message = rpc.request("double", EIGHT)
    change(message)
    _, answer = rpc.call("ModelInfer", message)
    assert answer.status == 400
    assert words in answer.error


def test_typed_contents_are_those_of_the_datatype_and_fit(rpc: Rpc) -> None:
    message = rpc.request("int8", Tensor("x", "INT8", [[300, 1]], typed=True))
    assert "does not fit" in rpc.call("ModelInfer", message)[1].error
    message.inputs[0].contents.int_contents[0] = -128
    assert rpc.call("ModelInfer", message)[0].raw_output_contents == [b"\x80\x01"]
    message.inputs[0].contents.fp32_contents.append(1)
    assert "expected int_contents" in rpc.call("ModelInfer", message)[1].error
    half = rpc.request("bfloat16", Tensor("x", "BF16", [[1, 2]]))
    half.ClearField("raw_input_contents")
    half.inputs[0].contents.fp32_contents.extend([1, 2])
    assert "no typed contents" in rpc.call("ModelInfer", half)[1].error


@pytest.mark.parametrize("typed", [True, False])
def test_texts_are_tokenized_in_their_order(rpc: Rpc, typed: bool) -> None:
    texts = ["abc", "d", "abcdefghij"]
    given = Tensor("text", "BYTES", [text.encode() for text in texts], typed=typed)
    answer = rpc.infer("embedder", given)
    assert answer.outputs["embedding"].tolist() == embedder().embed(texts).tolist()


def test_a_message_that_is_none_is_refused(rpc: Rpc) -> None:
    ask = rpc.channel.unary_unary(f"/{SERVICE}/ModelInfer")
    with pytest.raises(grpc.RpcError) as error:
        ask(b"\xff\xff\xff", timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    doubled(rpc)


def test_a_message_above_the_limit_is_refused_squeezed_or_not(server: Live, rpc: Rpc) -> None:
    big = Tensor("x", "FP32", np.zeros((1 << 17, 4), np.float32))
    for squeeze in ("", "gzip"):
        answer = rpc.infer("double", big, squeeze=squeeze)
        assert (answer.status, "larger than max" in answer.error) == (413, True), answer
    wait_until(lambda: counted(server, 413) == 2)
    doubled(rpc)


@pytest.mark.parametrize("squeeze", ["gzip", "deflate"])
def test_compressed_messages_are_inflated(rpc: Rpc, squeeze: str) -> None:
    assert rpc.infer("double", EIGHT, squeeze=squeeze).outputs["y"].sum() == 56


def test_a_slow_message_is_ended_at_its_deadline(server: Live, rpc: Rpc) -> None:
    def never() -> Iterator[bytes]:
        time.sleep(3)
        yield b""

    ask = rpc.channel.stream_unary(f"/{SERVICE}/ModelInfer")
    with pytest.raises(grpc.RpcError) as error:
        ask(never(), timeout=20)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive within 0.5 s" in (error.value.details() or "")
    assert counted(server, 408) == 1


def test_every_method_of_the_protocol_is_answered_or_refused_by_name(rpc: Rpc) -> None:
    names = [*rpcs(None), "ModelInfer"]
    for name in names:
        if f"{name}Request" not in MESSAGES:
            _, answer = rpc.call(name, b"")
            assert (answer.status, bool(answer.error)) == (501, True)
            assert "Method not found" not in answer.error
    index = rpc.change("index")
    assert (index.status, "--allow-reload" in index.error) == (501, True)
    shared = [name for name in names if "SharedMemory" in name]
    assert len(shared) == 6
    assert all("shared memory" in rpc.call(name, b"")[1].error for name in shared)


def test_a_stream_is_answered_in_order_with_errors_as_messages(rpc: Rpc) -> None:
    asked = [
        rpc.request("nope" if i == 3 else "double", Tensor("x", "FP32", np.full((1, 4), i, "f4")), id=f"{i}")
        for i in range(200)
    ]
    replies = list(rpc.stream(iter(asked), timeout=30))
    assert [reply.infer_response.id for reply in replies] == [str(i) for i in range(200)]
    assert [i for i, reply in enumerate(replies) if reply.error_message] == [3]
    for i, reply in enumerate(replies):
        if i != 3:
            assert Rpc.answer(reply.infer_response, Answer(200)).outputs["y"].tolist() == [[2.0 * i] * 4]


def test_requests_of_a_stream_share_batches() -> None:
    model = double(seconds=0.05)
    with live(model, rpc=True) as server, clients(server) as wires:
        one = wires["gRPC"].request("double", Tensor("x", "FP32", np.ones((1, 4), "f4")))
        assert len(list(wires["gRPC"].stream(iter([one] * 32), timeout=30))) == 32
    assert max(model.batches) > 1


def test_keys_are_asked_for_but_for_liveness() -> None:
    with live(double(), api_key=["first", "second"], rpc=True) as server:
        with clients(server) as wires:
            rpc = wires["gRPC"]
            assert rpc.get("live").parameters == {"live": True}
            for answer in (rpc.get("metadata"), rpc.infer("double", EIGHT), rpc.get("ready")):
                assert (answer.status, "API key" in answer.error) == (401, True)
            with pytest.raises(grpc.RpcError) as error:
                next(rpc.stream(iter([rpc.request("double", EIGHT)]), timeout=10))
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for key in ("first", "second"):
            with clients(server, key) as wires:
                doubled(wires["gRPC"])


def test_deadlines_and_timeouts_end_a_request() -> None:
    with live(double(seconds=0.5), rpc=True) as server, clients(server) as wires:
        rpc = wires["gRPC"]
        assert rpc.infer("double", EIGHT, timeout=0.1).status == 504
        late = rpc.infer("double", EIGHT, parameters={"timeout": 100_000})
        assert (late.status, "deadline passed" in late.error) == (504, True)
        late = rpc.infer("double", EIGHT, timeout=None, headers={"x-request-timeout-ms": "100"})
        assert late.status == 504
        doubled(rpc)


def test_a_cancelled_call_leaves_the_queue() -> None:
    with live(double(seconds=0.3, max_batch=1), rpc=True) as server, clients(server) as wires:
        rpc, one = wires["gRPC"], Tensor("x", "FP32", np.ones((1, 4), "f4"))
        ask = rpc.channel.unary_unary(
            f"/{SERVICE}/ModelInfer", request_serializer=lambda m: m.SerializeToString()
        )
        calls = [ask.future(rpc.request("double", one)) for _ in range(8)]
        while server.service.engines["double"].waiting < 6:
            time.sleep(0.01)
        for call in calls[1:]:
            call.cancel()
        until = time.monotonic() + 10
        while server.service.active and time.monotonic() < until:
            time.sleep(0.01)
        assert server.service.engines["double"].waiting == 0
        assert counted(server, 499) == 7
        assert calls[0].exception() is None


def test_overload_is_unavailable_with_a_time_to_come_back() -> None:
    limits = ServeLimits(max_queue_requests=1)
    with live(double(seconds=0.2, max_batch=1), limits=limits, rpc=True) as server, clients(server) as wires:
        one = Tensor("x", "FP32", np.ones((1, 4), "f4"))
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: wires["gRPC"].infer("double", one), range(8)))
    refused = [answer for answer in answers if answer.status == 503]
    assert refused
    assert all(int(answer.headers["retry-after-ms"]) > 0 for answer in refused)
    assert all("grpc-retry-pushback-ms" in answer.headers for answer in refused)
    assert {answer.status for answer in answers} == {200, 503}


def test_a_models_error_shows_the_request_id_only(rpc: Rpc, caplog: pytest.LogCaptureFixture) -> None:
    answer = rpc.infer(
        "double", Tensor("x", "FP32", np.full((1, 4), 666, "f4")), headers={"x-request-id": "who"}
    )
    assert (answer.status, "who" in answer.error, "secret" in answer.error) == (500, True, False)
    assert answer.headers["x-request-id"] == "who"


def test_requests_are_counted_and_traced_as_of_their_own_api(server: Live, rpc: Rpc) -> None:
    before = counted(server, 200)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = rpc.infer("double", EIGHT, headers={"traceparent": parent})
    assert answer.headers["traceresponse"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert len(answer.headers["x-request-id"]) == 32
    assert counted(server, 200) == before + 1


def test_mutated_messages_are_answered_or_refused(rpc: Rpc) -> None:
    random = np.random.default_rng(0)
    ask = rpc.channel.unary_unary(f"/{SERVICE}/ModelInfer")
    whole = rpc.request("double", EIGHT, outputs=["y"], parameters={"priority": 1}).SerializeToString()
    codes = set()
    for _ in range(400):
        body = bytearray(whole)
        for at in random.integers(0, len(body), random.integers(1, 5)):
            body[at] = random.integers(0, 256)
        try:
            ask(bytes(body[: random.integers(1, len(body) + 1)]), timeout=10)
        except grpc.RpcError as error:
            codes.add(error.code())
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    doubled(rpc)


def test_models_of_the_repository_load_and_unload(tmp_path: Path) -> None:
    for name in ("m", "n"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "manifest.json").write_text('{"factor": 3}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = {"allow_reload": True, "grpc_port": port}
    with (
        serving(opener="multiplies", path=str(tmp_path), run=run),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        rpc, one = Rpc(channel), Tensor("x", "FP32", np.ones((1, 4), "f4"))
        assert rpc.infer("m", one).outputs["y"].tolist() == [[3.0] * 4]
        assert rpc.change("load", "m", config="{}").status == 400
        assert rpc.change("load", "nope").status == 404
        assert rpc.change("unload", "m").status == 200
        assert rpc.infer("m", one).status == 404
        states = {model["name"]: model["state"] for model in rpc.change("index").parameters["models"]}
        assert states == {"m": "UNAVAILABLE", "n": "READY"}
        named = MESSAGES["RepositoryIndexRequest"](repository_name="other")
        assert "repository_name" in rpc.call("RepositoryIndex", named)[1].error
        assert rpc.change("load", "m").status == 200
        assert rpc.infer("m", one).status == 200


def test_shutdown_answers_what_was_accepted_and_exits_zero(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from infer.serve.grpc import RpcListener\n"
        "from infer.serve.http.listener import listen\n"
        "from infer.serve.server import serve\n"
        "from infer.serve.service import Service\n"
        "from tests.support.fake_predictors import double\n"
        "with listen('127.0.0.1', 0) as one, listen('127.0.0.1', 0) as two:\n"
        "    sys.exit(serve(Service([double(seconds=0.5, max_batch=1)]), one, rpc=RpcListener(two)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.partition("gRPC at ")[2].split(",")[0]
        with grpc.insecure_channel(address) as channel:
            rpc, one = Rpc(channel), Tensor("x", "FP32", np.ones((1, 4), "f4"))
            with ThreadPoolExecutor(3) as pool:
                calls = [pool.submit(rpc.infer, "double", one) for _ in range(3)]
                time.sleep(0.3)
                process.terminate()
                time.sleep(0.15)
                assert rpc.infer("double", one).status == 503
                assert [call.result().status for call in calls] == [200] * 3
        assert process.wait(20) == 0


def test_tls_is_that_of_http(tmp_path: Path) -> None:
    key, chain = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    more = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    subprocess.run([*command, *more], check=True, capture_output=True)
    with live(double(), rpc=True, tls_files=(str(chain), str(key))) as server:
        trusting = grpc.ssl_channel_credentials(chain.read_bytes())
        with grpc.secure_channel(server.rpc, trusting) as channel:
            doubled(Rpc(channel))
        with grpc.insecure_channel(server.rpc) as channel:
            assert Rpc(channel).infer("double", EIGHT, timeout=5).status == 503


def test_the_command_line_refuses_what_grpc_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options, code, said in (
            (["--grpc-port", str(port)], 6, "--grpc-port"),
            (["--grpc-port", "70000"], 2, "65535"),
        ):
            assert main(["serve", "nowhere.infer", "--port", "0", *options]) == code
            assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UsageError, match="--grpc-port"):
        check(ServeOptions(artifacts=("a.infer",), ray=True, grpc_port=1))
