"""API keys, key files, TLS, open files, and limits from the command line."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer.cli import main
from infer.errors import InferError, UsageError
from infer.sanitize import sanitize_text
from infer.serve import limits
from infer.serve.http import access_control, listener
from infer.serve.http.routing import exception_summary
from infer.serve.limits import ServeLimits
from tests.support import raw_http
from tests.support.fake_predictors import double, live
from tests.support.raw_http import BODY, HEALTH, ask, connect, get, read, well

KEYS = ["first-key", "second-key"]
LIVENESS = {"/health", "/v2/health/live"}
PAGE = {"/", "/page/{file}"}  # static; "/" is the page for browsers only


# --- keys
def test_every_route_but_liveness_needs_a_key() -> None:
    with live(double(), api_key=KEYS) as server, httpx.Client(base_url=server.url) as client:
        routes = server.service.routes
        assert {r.path for r in routes if r.open} == LIVENESS | PAGE
        for path in ("/", "/page/app.js"):
            browser = client.get(path, headers={"Accept": "text/html"})
            assert b"double" not in browser.content, "the page says nothing of the server"
        for route in routes:
            if route.path == "/page/{file}":
                continue
            path = route.path.replace("{model}", "double").replace("{version}", "1")
            status = client.request(route.method, path).status_code
            assert (status != 401) == (path in LIVENESS), path
        for method, path in [
            ("GET", "/nope"),
            ("DELETE", "/v2"),
            ("PUT", "/v2/health/live"),
            ("OPTIONS", "/"),
        ]:
            assert client.request(method, path).status_code == 401
        refused = client.post("/v2/models/double/infer", content=b"a" * 1000)
        assert refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer first-key"}, 200),
        ({"Authorization": "bearer second-key"}, 200),
        ({"Authorization": "BEARER  second-key"}, 200),
        ({"X-Api-Key": "second-key"}, 200),
        ({"X-Api-Key": "second-key", "Authorization": "Basic x"}, 200),
        ({"X-Api-Key": "second-key", "Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer first-key second-key"}, 401),
        ({"Authorization": "Bearer first-ke"}, 401),
        ({"Authorization": "Bearer first-keyy"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "first-key"}, 401),
        ({"Authorization": "Basic first-key"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "FIRST-KEY"}, 401),
        ({"Cookie": "api_key=first-key"}, 401),
        ({}, 401),
    ],
)
def test_a_key_is_accepted_whole_from_either_header(headers: dict[str, str], status: int) -> None:
    given = {name.lower().encode(): value.encode() for name, value in headers.items()}
    assert access_control.ApiKeys(KEYS).admit(given) == (status == 200)


def test_all_keys_are_compared_as_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return one == other

    known = access_control.ApiKeys(["a", "b" * 100, "c"])
    monkeypatch.setattr(access_control.hmac, "compare_digest", compare)
    assert known.admit({b"x-api-key": b"a"})
    assert len(seen) == 3, "a key that fits does not end the comparison"
    assert {len(value) for pair in seen for value in pair} == {32}


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "ü", "a" * 1025, "\x00"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="visible ASCII"):
        access_control.ApiKeys([key])


def test_a_private_key_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key\n\n  second-key \n")
    file.chmod(0o600)
    assert access_control.read_key_file(file) == KEYS


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o620, 0o610])
def test_a_key_file_with_access_for_others_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key")
    file.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}") as caught:
        access_control.read_key_file(file)
    assert "chmod 600" in str(caught.value)
    assert "first-key" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"\xff\xfe", b"a" * 70_000])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(UsageError):
        access_control.read_key_file(file)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="key file"):
            access_control.read_key_file(path)


# --- TLS
@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        + ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        check=True,
        capture_output=True,
    )
    return cert, key


def test_https_works_with_certificate_verification(certificate: tuple[Path, Path]) -> None:
    with live(double(), tls=listener.tls_context(*certificate)) as server:
        trusting = ssl.create_default_context(cafile=str(certificate[0]))
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trusting) as client:
            assert client.get("/health").json() == {"status": "ok"}
            answer = client.post("/v2/models/double/infer", content=BODY)
            assert answer.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
            big = client.post("/v2/models/double/infer", content=b" " * 3_000_000)
            assert big.status_code == 400
        with (
            httpx.Client(base_url=f"https://127.0.0.1:{server.port}") as strict,
            pytest.raises(httpx.ConnectError),
        ):
            strict.get("/health")


def test_old_tls_and_plain_http_get_no_response(certificate: tuple[Path, Path]) -> None:
    with live(double(), tls=listener.tls_context(*certificate)) as server:
        with connect(server) as plain_client:
            plain_client.sendall(HEALTH)
            with contextlib.suppress(ConnectionError):
                assert not plain_client.recv(100).startswith(b"HTTP")
        assert listener.tls_context(*certificate).minimum_version >= ssl.TLSVersion.TLSv1_2
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with connect(server) as connection, pytest.raises((ssl.SSLError, OSError)):
            old.wrap_socket(connection)


def test_an_endless_handshake_is_aborted_and_counts_as_a_connection(
    certificate: tuple[Path, Path],
) -> None:
    bounds = ServeLimits(header_seconds=0.5, max_connections=4, spare_connections=1)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    with (
        live(double(), limits=bounds, tls=listener.tls_context(*certificate)) as server,
        contextlib.ExitStack() as stack,
    ):
        began = time.monotonic()
        silent = [stack.enter_context(connect(server)) for _ in range(5)]
        silent[0].sendall(b"\x16\x03\x01")
        extra = stack.enter_context(connect(server))
        assert raw_http.closed(extra, 3), "one beyond the limit is reset"
        assert all(raw_http.closed(connection, 5) for connection in silent)
        assert 0.3 < time.monotonic() - began < 8
        with connect(server) as raw, trusting.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
            secure.sendall(HEALTH)
            assert read(secure, bytearray()).status == 200


def test_invalid_certificates_are_usage_errors(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    with pytest.raises(UsageError, match="no such file"):
        listener.tls_context(tmp_path / "none.pem")
    with pytest.raises(UsageError, match="cannot load the TLS certificate and key"):
        listener.tls_context(key, key)
    other = tmp_path / "other.pem"
    other.write_text("not a certificate")
    with pytest.raises(UsageError, match="cannot load the TLS certificate and key"):
        listener.tls_context(other, key)
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(UsageError, match="cannot load the TLS certificate and key"):
        listener.tls_context(cert, locked)
    assert listener.tls_context(cert, locked, "word")


# --- open files
CODE = """
import resource, sys
from infer.errors import ResourceError
from infer.serve.http import listener as descriptors
from infer.serve.limits import ServeLimits
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    fitted, said = descriptors.fit_connections(ServeLimits(max_connections={cap}))
    print(fitted.max_connections, fitted.spare_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0], said)
except ResourceError as error:
    print(error.exit_code, error)
"""


def test_the_limit_of_open_files_is_raised_if_allowed(run_python: Any) -> None:
    cap, spare, soft, said = run_python(CODE.format(soft=256, hard=4096, cap=1024)).split(maxsplit=3)
    assert (int(cap), int(spare), said.strip()) == (1024, 64, "None")
    assert 1024 + 64 < int(soft) <= 4096


def test_connections_follow_the_limit_of_open_files(run_python: Any) -> None:
    cap, spare, soft, said = run_python(CODE.format(soft=200, hard=200, cap=1024)).split(maxsplit=3)
    assert 50 < int(cap) + int(spare) < 200 == int(soft)
    assert f"only 200 files may be open: at most {cap} connections instead of 1024 (ulimit -n" in said


def test_too_few_open_files_is_an_error_with_a_hint(run_python: Any) -> None:
    code, said = run_python(CODE.format(soft=16, hard=16, cap=1024)).split(maxsplit=1)
    assert code == "7"
    assert "only 16 files may be open" in said
    assert "ulimit -n" in said


# --- limits and outputs
def test_limits_are_read_from_the_command_line() -> None:
    made = limits.parse(["max_body_bytes=1MiB", "header_seconds=2.5", "nonfinite_error=true", "max_batch=4"])
    assert (made.max_body_bytes, made.header_seconds, made.nonfinite_error, made.max_batch) == (
        1 << 20,
        2.5,
        True,
        4,
    )


@pytest.mark.parametrize(
    "pair", ["max_bodi=1", "max_body_bytes", "max_body_bytes=", "max_body_bytes=-1", "max_body_bytes=0"]
    + ["max_body_bytes=1e3", "max_body_bytes=1.5", "max_connections=many", "header_seconds=nan"],
)  # fmt: skip
def test_invalid_limits_are_usage_errors(pair: str) -> None:
    with pytest.raises(UsageError):
        limits.parse([pair])


def test_outputs_that_are_not_finite_can_be_refused(tmp_path: Path) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0]}]})
    binary = json.dumps({**json.loads(body), "parameters": {"binary_data_output": True}})
    with live(raw_http.wild()) as server, httpx.Client(base_url=server.url) as client:
        assert client.post("/v2/models/wild/infer", content=body).json()["outputs"][0]["data"][0] == "NaN"
        assert client.post("/v2/models/wild/infer", content=binary).status_code == 200
        assert 'infer_nonfinite_outputs_total{model="wild",version="1"} 6.0' in client.get("/metrics").text
    with live(raw_http.wild(), limits=ServeLimits(nonfinite_error=True)) as server:
        for content in (body, binary):
            answer = httpx.post(f"{server.url}/v2/models/wild/infer", content=content)
            assert answer.status_code == 500
            assert answer.json() == {"error": "3 values of output y are not finite"}


def test_bfloat16_nan_is_detected_in_its_bits() -> None:
    from infer.serve.api.kserve.kserve_tensors import count_nonfinite
    from infer.spec import TensorSpec

    values = np.array([0x7FC0, 0x7F80, 0xFF80, 0x3F80, 0], np.uint16)
    assert count_nonfinite(values, TensorSpec("y", "bfloat16", (5,))) == 3


# --- what others had a hand in
def test_error_texts_are_short_single_lines_of_visible_characters() -> None:
    assert (
        sanitize_text("a\r\nb\x00\x1b[31m\u202e\u2028\x85é😀")
        == "a\\r\\nb\\x00\\x1b[31m\\u202e\\u2028\\x85é😀"
    )
    assert len(sanitize_text("a" * 5000)) == 1024


LINE = "\r\n2026-11-21 FATAL the server was \x1b[31mtaken over\u2028"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v2/models/double/infer",
            {"inputs": [{"name": LINE, "datatype": LINE, "shape": [1, 4], "data": []}]},
        ),
        ("/v2/models/double/infer", {"inputs": [], "parameters": {"sequence_" + LINE: 1}}),
        ("/v2/models/double/infer", {"inputs": [{"name": "x", "datatype": LINE * 9, "shape": [1, 4]}]}),
        ("/v1/embeddings", {"model": LINE, "input": "a", "encoding_format": LINE * 900}),
        ("/v1/completions", {"model": LINE, "prompt": LINE}),
    ],
)
def test_client_text_cannot_add_a_log_line(path: str, body: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with live(double()) as server:
        answer = httpx.post(
            server.url + path, json=body, headers={"X-Request-Id": "ok\tFATAL", "User-Agent": "a"}
        )
        assert answer.status_code in (400, 404)
        said = answer.json()["error"]
        text = said if isinstance(said, str) else said["message"]
        assert len(text) <= 1024
        assert text.isprintable()
        assert not any(c in answer.headers["x-request-id"] for c in "\t\r\n ")
    for record in caplog.records:
        assert "\n2026" not in record.getMessage()
        assert "\x1b" not in record.getMessage()


def test_a_model_exception_is_logged_in_one_line_and_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        try:
            raise ValueError("secret\nFATAL \x1b[31m" + "a" * 5000)
        except ValueError as error:
            raise InferError("outer\nline") from error
    except InferError as error:
        said = exception_summary(error)
    assert "\n" not in said
    assert "\x1b" not in said
    assert "InferError: outer\\nline" in said
    assert "ValueError: secret\\nFATAL" in said
    assert len(said) < 1500


def test_an_error_under_python_o_is_the_same_error(tmp_path: Path) -> None:
    with raw_http.process(tmp_path, "-O") as server:
        well(server)
        assert ask(server, get(b"/v2/models/nope")).status == 404


def test_the_command_line_refuses_partial_tls_and_open_key_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("INFER_API_KEY", raising=False)
    file = tmp_path / "keys"
    file.write_text("first-key")
    file.chmod(0o644)
    for options, said in [
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        (["--ssl-certfile", "none.pem"], "no such file"),
        (["--api-key-file", str(file)], "chmod 600"),
        (["--limit", "max_bodi_bytes=1"], "max_body_bytes"),
        (["--host", "0.0.0.0"], "no API key"),  # noqa: S104
    ]:
        assert main(["serve", "nowhere.infer", "--port", "0", *options]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
