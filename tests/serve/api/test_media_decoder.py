"""Decoder processes: same values as in the server's process, and a crash that costs one request."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from infer.errors import InputError, NotReadyError, SourceError
from infer.preprocess.audio import open_sound
from infer.preprocess.image import ImagePreprocessor, open_image
from infer.serve.media_decoder import processes
from infer.serve.media_decoder.processes import DecodeImage, DecodeSound, MediaDecoders
from tests.support import fake_media
from tests.support.fake_media import png, speech, wav
from tests.support.fake_predictors import live

CRASHING = "tests.support.crashing_decoder"
STEPS = ImagePreprocessor(size=(7, 5), scale=1 / 255, mean=(0.5,) * 3, std=(0.25,) * 3)
PICTURE = fake_media.two_colors((250, 10, 10), (10, 250, 10), (33, 21))


@pytest.fixture(scope="module")
def decoders() -> Iterator[MediaDecoders]:
    found = MediaDecoders(CRASHING)
    yield found
    found.close()


def image(data: bytes, steps: ImagePreprocessor | None = STEPS) -> DecodeImage:
    return DecodeImage(data, "inputs[3]", 1 << 20, 3, steps)


def test_files_have_the_values_of_decoding_in_this_process(decoders: MediaDecoders) -> None:
    found = decoders.image(image(PICTURE))
    assert found.size == (21, 33)
    np.testing.assert_array_equal(
        found.arrays()["pixel_values"], STEPS.batch([open_image(PICTURE)])["pixel_values"]
    )
    pixels = decoders.image(image(PICTURE, None)).pixels
    np.testing.assert_array_equal(
        np.frombuffer(pixels, np.uint8).reshape(21, 33, 3), np.asarray(open_image(PICTURE))
    )
    sound = wav(speech("abc"))
    rate = fake_media.RATE
    np.testing.assert_array_equal(decoders.sound(DecodeSound(sound, "", rate, None)), open_sound(sound, rate))


def test_errors_of_the_decoder_process_keep_class_and_position(decoders: MediaDecoders) -> None:
    with pytest.raises(SourceError, match="expected an image file, one of") as refused:
        decoders.image(image(b"no image"))
    assert refused.value.where == "inputs[3]"
    with pytest.raises(InputError, match="at most 3 s"):
        decoders.sound(DecodeSound(wav(np.zeros(4 * fake_media.RATE)), "file", fake_media.RATE, 3))
    assert decoders.image(image(PICTURE)).size == (21, 33)


def test_a_decoder_crash_fails_one_file_only(decoders: MediaDecoders) -> None:
    with ThreadPoolExecutor(3) as pool:
        good = [pool.submit(decoders.image, image(PICTURE)) for _ in range(4)]
        bad = pool.submit(decoders.image, image(b"CRASH"))
        with pytest.raises(InputError, match=r"ended \(signal SIGSEGV\) on this one") as refused:
            bad.result()
        assert [one.result().size for one in good] == [(21, 33)] * 4
    assert refused.value.where == "inputs[3]"


def test_a_slow_media_file_times_out(decoders: MediaDecoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SECONDS", 0.2)
    with pytest.raises(InputError, match="took longer than 0.2 s"):
        decoders.image(image(b"HANG"))


def test_closed_decoders_start_no_process() -> None:
    decoders = MediaDecoders()
    decoders.close()
    with pytest.raises(NotReadyError, match="stopping"):
        decoders.image(image(PICTURE))


def test_the_server_outlives_a_crash() -> None:
    with live(fake_media.colors()) as server:
        server.service.decoders.close()
        server.service.decoders = MediaDecoders(CRASHING)
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {"model": "colors", "inputs": base64.b64encode(b"CRASH").decode()}
            refused = client.post("/predict", json=body)
            assert refused.status_code == 400
            assert "SIGSEGV" in refused.json()["error"]
            body["inputs"] = base64.b64encode(png((250, 10, 10))).decode()
            assert client.post("/predict", json=body).json()[0]["label"] == "red"
