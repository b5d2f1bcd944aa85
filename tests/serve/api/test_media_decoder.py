"""Decoder processes: same values as in the server's process, and a crash that costs one request."""

from __future__ import annotations

import asyncio
import base64
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from infer.errors import DeadlineError, InputError, NotReadyError, SourceError, TooLargeError
from infer.preprocess.audio import open_sound
from infer.preprocess.image import ImagePreprocessor, open_image
from infer.serve.media_decoder.messages import DecodeImage, DecodeLimits, DecodeSound
from infer.serve.media_decoder.processes import CORES, PLACES, MediaDecoders
from tests.fuzz import media_files
from tests.support import fake_media
from tests.support.fake_media import png, speech, wav
from tests.support.fake_predictors import live
from tests.support.simultaneous_requests import until

CRASHING = "tests.support.crashing_decoder"
STEPS = ImagePreprocessor(size=(7, 5), scale=1 / 255, mean=(0.5,) * 3, std=(0.25,) * 3)
PICTURE = fake_media.two_colors((250, 10, 10), (10, 250, 10), (33, 21))
LIMITS = DecodeLimits(pixels=1 << 20, audio_seconds=3)


class Decoding:
    """Decoders on an event loop of their own; `image` and `sound` wait for the answer."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        self.decoders = MediaDecoders(CRASHING)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            self.over = asyncio.Event()
            runner.run(self.over.wait())

    def ask(self, asked: Any, client: str = "one", seconds: float = 30) -> Future[Any]:
        decode = self.decoders.sound if isinstance(asked, DecodeSound) else self.decoders.image
        return asyncio.run_coroutine_threadsafe(decode(asked, client, seconds), self.loop)

    def close(self) -> None:
        self.decoders.close()
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join()


@pytest.fixture(scope="module")
def decoding() -> Iterator[Decoding]:
    found = Decoding()
    yield found
    found.close()


def image(data: bytes, steps: ImagePreprocessor | None = STEPS, limits: DecodeLimits = LIMITS) -> DecodeImage:
    return DecodeImage(data, "inputs[3]", 3, steps, limits)


def test_files_have_the_values_of_decoding_in_this_process(decoding: Decoding) -> None:
    found = decoding.ask(image(PICTURE)).result()
    assert found.size == (21, 33)
    np.testing.assert_array_equal(
        found.arrays()["pixel_values"], STEPS.batch([open_image(PICTURE)])["pixel_values"]
    )
    pixels = decoding.ask(image(PICTURE, None)).result().pixels
    np.testing.assert_array_equal(
        np.frombuffer(pixels, np.uint8).reshape(21, 33, 3), np.asarray(open_image(PICTURE))
    )
    sound = wav(speech("abc"))
    rate = fake_media.RATE
    np.testing.assert_array_equal(
        decoding.ask(DecodeSound(sound, "", rate, LIMITS)).result(), open_sound(sound, rate)
    )


def test_errors_of_the_decoder_process_keep_class_and_position(decoding: Decoding) -> None:
    with pytest.raises(SourceError, match="expected an image file, one of") as refused:
        decoding.ask(image(b"no image")).result()
    assert refused.value.where == "inputs[3]"
    sound = wav(np.zeros(4 * fake_media.RATE))
    with pytest.raises(InputError, match="at most 3 s"):
        decoding.ask(DecodeSound(sound, "file", fake_media.RATE, LIMITS)).result()
    assert decoding.ask(image(PICTURE)).result().size == (21, 33)


def test_a_decoder_crash_fails_one_file_only(decoding: Decoding) -> None:
    good = [decoding.ask(image(PICTURE)) for _ in range(4)]
    bad = decoding.ask(image(b"CRASH"))
    with pytest.raises(InputError, match=r"ended \(signal SIGSEGV\) on this one") as refused:
        bad.result()
    assert [one.result().size for one in good] == [(21, 33)] * 4
    assert refused.value.where == "inputs[3]"


def test_an_error_of_any_kind_refuses_the_file_and_keeps_its_process(decoding: Decoding) -> None:
    with pytest.raises(SourceError, match="can't be decoded: RuntimeError: of a library"):
        decoding.ask(image(b"RAISE")).result()


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_decoded_or_refused_and_end_no_process(decoding: Decoding, seed: int) -> None:
    chance, wrong = random.Random(seed), list[str]()
    limits = DecodeLimits(pixels=1 << 22, audio_seconds=60)
    pictures, sounds = media_files.images(), media_files.sounds()
    for name in [*pictures, *sounds] * 3:
        data = media_files.damaged((pictures | sounds)[name], chance)
        small = ImagePreprocessor(shortest_edge=20, longest_edge=60, scale=1 / 255)
        asked: Any = image(data, chance.choice([small, STEPS, None]), limits)
        if name in sounds:
            asked = DecodeSound(data, "file", chance.choice([16000, 8000]), limits)
        try:
            found = decoding.ask(asked, f"{seed}").result()
            values = [found] if name in sounds else [*found.arrays().values()]
            wrong += [name for one in values if not np.isfinite(one).all()]
        except (InputError, SourceError) as error:
            wrong += [
                f"{name}: {error}" for sign in ("can't be decoded", "process that") if sign in str(error)
            ]
    assert wrong == []


def test_memory_of_a_file_is_limited_in_its_process(decoding: Decoding) -> None:
    with pytest.raises(TooLargeError, match="more than 64 MiB of memory"):
        decoding.ask(image(b"GROW", limits=DecodeLimits(memory=64 << 20))).result()
    assert decoding.ask(image(PICTURE)).result().size == (21, 33)


def test_processor_time_of_a_file_is_limited_in_its_process(decoding: Decoding) -> None:
    with pytest.raises(TooLargeError, match=r"more than 0.1 s of CPU time"):
        decoding.ask(image(b"SPIN", limits=DecodeLimits(seconds=0.1))).result()


def test_a_file_that_outlasts_its_request_is_ended_at_the_deadline(decoding: Decoding) -> None:
    with pytest.raises(DeadlineError, match="deadline passed"):
        decoding.ask(image(b"HANG"), seconds=0.2).result()


def test_slow_files_of_one_client_delay_no_file_of_it_or_of_others(decoding: Decoding) -> None:
    hanging = [decoding.ask(image(b"HANG")) for _ in range(3 * PLACES)]
    theirs = [decoding.ask(image(b"HANG"), "two") for _ in range(3 * PLACES)]
    for client in ("one", "two", "three"):
        assert decoding.ask(image(PICTURE), client).result(20).size == (21, 33)
    assert not any(one.done() for one in [*hanging, *theirs])
    for one in [*hanging, *theirs]:
        one.cancel()


def processes() -> int:
    return len(psutil.Process().children(recursive=True))


def test_a_cancelled_file_frees_its_place_and_its_process(decoding: Decoding) -> None:
    assert decoding.ask(image(PICTURE)).result(20).size == (21, 33)
    before = processes()
    hanging = [decoding.ask(image(b"HANG")) for _ in range(2 * PLACES)]
    until(lambda: processes() >= before + CORES - 1)
    for one in hanging:
        one.cancel()
    assert decoding.ask(image(PICTURE)).result(20).size == (21, 33)
    until(lambda: processes() <= before)


def test_closed_decoders_start_no_process() -> None:
    closed = Decoding()
    closed.decoders.close()
    with pytest.raises(NotReadyError, match="stopping"):
        closed.ask(image(PICTURE)).result()
    closed.close()


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
