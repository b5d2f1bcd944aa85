"""Uploads that would take minutes or gigabytes, hang up, or end the decoder: refusals, while others are served."""

from __future__ import annotations

import io
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from infer.errors import DeadlineError
from infer.serve.http.request_context import RequestContext
from infer.serve.limits import ServeLimits
from infer.serve.media_decoder.processes import PLACES, MediaDecoders
from tests.support import fake_media
from tests.support.fake_media import png, speech, transcriber, wav
from tests.support.fake_predictors import Live, live
from tests.support.simultaneous_requests import until

FLOOD, POLITE = "key-of-flood", "key-of-polite"
RED = (250, 10, 10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    models = fake_media.colors(), fake_media.listener(), transcriber(tmp_path_factory.mktemp("hearing"))
    with live(*models, limits=ServeLimits(max_file_bytes=1 << 20)) as server:
        yield server


def predict(server: Live, data: bytes, **headers: str) -> httpx.Response:
    files = {"file": ("a", data)}
    return httpx.post(
        f"{server.url}/predict", data={"model": "colors"}, files=files, headers=headers, timeout=60
    )


def hear(server: Live, data: bytes, path: str = "/v1/audio/transcriptions") -> httpx.Response:
    model = "hearing" if path.startswith("/v1") else "loudness"
    files = {"file": ("a.wav", data)}
    return httpx.post(f"{server.url}{path}", data={"model": model}, files=files, timeout=60)


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """Return a progressive JPEG whose last scan comes again and again."""
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    begin, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[begin:end] * scans + b"\xff\xd9"


def floats(samples: np.ndarray, dtype: str = "<f4") -> bytes:
    """Return a WAV file of floats at 4 kHz."""
    body = samples.astype(dtype).tobytes()
    width = np.dtype(dtype).itemsize
    rate = fake_media.RATE
    head = struct.pack("<HHIIHH", 3, 1, rate, rate * width, width, 8 * width)
    chunks = b"fmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(server: Live) -> None:
    answer = predict(server, jpeg_of_scans(64, 2000))
    assert answer.status_code == 400
    assert "expected at most 100 scans" in answer.text
    assert predict(server, jpeg_of_scans(64, 20)).status_code == 200


def test_a_large_jpeg_may_have_fewer_scans(server: Live) -> None:
    answer = predict(server, jpeg_of_scans(8000, 20))
    assert answer.status_code == 400
    assert "expected at most 16 scans in a JPEG of 8000 x 8000 pixels" in answer.text


def test_a_webp_that_takes_a_gigabyte_is_refused_by_its_header(server: Live) -> None:
    file = io.BytesIO()
    Image.new("1", (16383, 4096)).convert("RGB").save(file, "WEBP", lossless=True, method=0)
    answer = predict(server, file.getvalue())
    assert answer.status_code == 400
    assert "takes 1023 MiB of memory, 768 are allowed" in answer.text


def test_a_file_of_too_many_bytes_is_413(server: Live) -> None:
    answer = predict(server, bytes((1 << 20) + 1))
    assert answer.status_code == 413
    assert "expected a file of at most 1048576 bytes" in answer.text


def test_a_strip_that_would_be_resized_to_nothing_is_refused() -> None:
    model = fake_media.colors()
    model.info.meta["preprocessing"] = {"channels": 3, "shortest_edge": 8, "longest_edge": 10}
    with live(model) as server:
        answer = predict(server, png(RED, (4000, 1)))
        assert answer.status_code == 400
        assert "would be resized to 10 x 0" in answer.text


@pytest.mark.parametrize("size", [0, 20, 0xFFFFFFFF])
def test_a_wav_is_read_whatever_size_its_riff_header_tells(server: Live, size: int) -> None:
    data = wav(speech("abc"))
    extra = b"LIST" + struct.pack("<I", 40) + bytes(40)
    found = hear(server, b"RIFF" + struct.pack("<I", size) + b"WAVE" + extra + data[12:])
    assert found.status_code == 200, found.text
    assert found.json()["text"] == "abc"


def test_a_wav_chunk_that_ends_behind_the_file_is_refused(server: Live) -> None:
    data = wav(speech("abc"))
    found = hear(server, data[:12] + b"LIST" + struct.pack("<I", 1 << 20) + data[12:])
    assert found.status_code == 400
    assert "longer than it says" in found.text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e300])
def test_samples_that_are_no_sound_are_refused(server: Live, value: float) -> None:
    samples = np.zeros(4000)
    samples[123] = value
    for path in ("/predict", "/v1/audio/transcriptions"):
        answer = hear(server, floats(samples, "<f8" if value == 1e300 else "<f4"), path)
        assert answer.status_code == 400
        assert "expected samples of -1 to 1" in answer.text


def test_the_timeout_in_a_body_counts_for_its_image_too(server: Live) -> None:
    route: Any = None
    for spent, fails in ((1.0, False), (4.0, True)):
        context = RequestContext(server.service, route, {}, {}, "a", began=time.monotonic() - spent)
        context.seconds = 3.0
        with pytest.raises(DeadlineError) if fails else nullcontext():
            assert 0 < context.generation_timeout() <= 2
            assert 0 < context.timeout() <= 2, "that of decoding"


@pytest.fixture
def hanging() -> Iterator[Live]:
    """Serve two keys with decoders that hang on a file that begins so."""
    with live(fake_media.colors(), api_key=[FLOOD, POLITE]) as server:
        server.service.decoders.close()
        server.service.decoders = MediaDecoders("tests.support.crashing_decoder")
        yield server


def test_decoding_counts_against_the_deadline_of_a_request(hanging: Live) -> None:
    headers = {"X-Api-Key": FLOOD, "X-Request-Timeout-Ms": "300"}
    answer = predict(hanging, b"HANG", **headers)
    assert answer.status_code == 504
    assert "deadline passed while its file was decoded" in answer.text


@pytest.mark.parametrize("honest", [FLOOD, POLITE])
def test_files_that_hang_delay_no_honest_image(hanging: Live, honest: str) -> None:
    with ThreadPoolExecutor(3 * PLACES) as pool:
        slow = {"X-Api-Key": FLOOD, "X-Request-Timeout-Ms": "20000"}
        flood = [pool.submit(predict, hanging, b"HANG", **slow) for _ in range(3 * PLACES)]
        until(lambda: hanging.service.active == len(flood))
        answer = predict(hanging, png(RED), **{"X-Api-Key": honest, "X-Request-Timeout-Ms": "15000"})
        assert answer.status_code == 200
        assert answer.json()[0]["label"] == "red"
        models = httpx.get(f"{hanging.url}/ops/models", headers={"X-Api-Key": POLITE}, timeout=15)
        assert models.status_code == 200
        assert httpx.get(f"{hanging.url}/health", timeout=15).status_code == 200
        hanging.service.decoders.close()
        assert {one.result().status_code for one in flood} <= {400, 503, 504}


def test_a_client_that_leaves_frees_its_places(hanging: Live) -> None:
    body = b"HANG" + bytes(1000)
    head = f"POST /predict HTTP/1.1\r\nHost: a\r\nX-Api-Key: {FLOOD}\r\nContent-Type: image/png\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    connections = [socket.create_connection((hanging.host, hanging.port)) for _ in range(2 * PLACES)]
    for connection in connections:
        connection.sendall(request)
    until(lambda: hanging.service.active == len(connections))
    for connection in connections:
        connection.close()
    until(lambda: hanging.service.active == 0)
    assert predict(hanging, png(RED), **{"X-Api-Key": FLOOD}).status_code == 200


def test_an_early_refusal_of_files_asks_for_their_own_key(tmp_path: Path) -> None:
    gate, calls = threading.Event(), list[int]()
    models = [fake_media.colors(), transcriber(tmp_path)]
    for model in models:
        run = model.function

        def gated(inputs: dict[str, np.ndarray], run: object = run) -> dict[str, np.ndarray]:
            calls.append(1)
            assert gate.wait(120)
            return run(inputs)  # type: ignore[operator,no-any-return]

        model.function = gated
        model.change(max_batch=1, sizes={**model.info.sizes, "batch": (1, 1)})
    limits = ServeLimits(max_queue_requests=2, max_batch=1, max_wait_seconds=1e6)
    with live(*models, limits=limits, api_key=[FLOOD, POLITE]) as server, ThreadPoolExecutor(8) as pool:

        def ask(name: str, data: bytes, key: str) -> int:
            path = "/predict" if name == "colors" else "/v1/audio/transcriptions"
            given = {"data": {"model": name}, "files": {"file": ("a", data)}, "headers": {"X-Api-Key": key}}
            return httpx.post(server.url + path, timeout=60, **given).status_code  # type: ignore[arg-type]

        try:
            for name, good in (("colors", png(RED)), ("hearing", wav(speech("ab")))):
                engine = server.service.engines[name]
                latency = engine.queue.latency
                latency.seed([(4, 0.01)] * 3)
                vars(latency)["observe"] = lambda work, seconds: None  # the clock decides nothing here
                began = len(calls)
                sent = [pool.submit(ask, name, good, FLOOD)]
                until(lambda: len(calls) > began)  # noqa: B023 - it runs, so that both places are free
                sent += [pool.submit(ask, name, good, FLOOD) for _ in range(2)]
                until(lambda: engine.waiting == 2)  # noqa: B023
                assert ask(name, b"no file at all", FLOOD) == 429
                assert ask(name, b"no file at all", POLITE) == 400
                assert not any(one.done() for one in sent)
        finally:
            gate.set()


def test_decoder_processes_write_nothing_to_the_log(server: Live, capfd: pytest.CaptureFixture[str]) -> None:
    predict(server, png(RED)[:60])
    hear(server, b"RIFF")
    predict(server, jpeg_of_scans(64, 3)[:200])
    time.sleep(0.05)
    assert "Traceback" not in capfd.readouterr().err
