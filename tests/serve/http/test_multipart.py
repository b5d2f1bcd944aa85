"""Forms: what browsers and clients send, and hostile bodies, which are refused and cost little."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from infer.errors import InferError, InputError, TooLargeError, UnsupportedMediaError
from infer.serve.http.multipart import MAX_PARTS, parse_form

HEADERS = {b"content-type": b'multipart/form-data; boundary="x y"'}
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'


def body(*parts: tuple[bytes, bytes], end: bytes = b"--x y--\r\n") -> bytes:
    return b"".join(b"--x y\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + end


def named(name: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"'


def test_fields_and_files_are_read_in_order() -> None:
    data = bytes(np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)) + b"\r\n--x \r\r\n--x"
    form = parse_form(
        bytearray(body((named(b"model"), b"a\xc3\xa4"), (FILE, data), (named(b"model"), b""))), HEADERS
    )
    assert form.fields == {"model": ["aä", ""]}
    assert form.file("file") == data
    assert form.files["file"][0].filename == "a.wav"
    assert form.text("nothing") is None


def test_a_preamble_and_an_epilogue_are_skipped() -> None:
    form = parse_form(b"\r\n" + body((FILE, b"abc")) + b"epilogue", HEADERS)
    assert form.file("file") == b"abc"


HOSTILE = {
    "nothing": b"",
    "text": b"hello",
    "no end": body((FILE, b"abc"), end=b""),
    "no name": body((b"Content-Disposition: form-data", b"a")),
    "no disposition": body((b"Content-Type: a/b", b"a")),
    "attachment": body((b'Content-Disposition: attachment; name="a"', b"a")),
    "base64": body((FILE + b"\r\nContent-Transfer-Encoding: base64", b"YQ==")),
    "not UTF-8": body((named(b"model"), b"\xff")),
    "name not UTF-8": body((named(b"\xff"), b"a")),
    "no file": body((named(b"file"), b"a")),
    "empty file": body((FILE, b"")),
    "two files": body((FILE, b"a"), (FILE, b"b")),
    "bad header": b"--x y\r\nContent Disposition\r\n\r\na\r\n--x y--\r\n",
    "long header": body((b"A: " + b"b" * 10_000, b"a")),
    "many headers": body((b"\r\n".join([b"A: b"] * 50), b"a")),
    "nul": b"--x y\r\n\0\0\0\r\n\r\n",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_malformed_form_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        parse_form(data, HEADERS).file("file")


@pytest.mark.parametrize(
    "kind",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/mixed; boundary=x",
        b"multipart/form-data; boundary=",
    ],
)
def test_another_media_type_is_refused(kind: bytes) -> None:
    with pytest.raises(UnsupportedMediaError):
        parse_form(body((FILE, b"a")), {b"content-type": kind})


def test_parts_fields_and_headers_are_bounded() -> None:
    parse_form(body(*[(named(b"a"), b"")] * MAX_PARTS), HEADERS)
    with pytest.raises(TooLargeError, match="at most 64 parts"):
        parse_form(body(*[(named(b"a"), b"")] * (MAX_PARTS + 1)), HEADERS)
    with pytest.raises(TooLargeError, match="65536 bytes of a field"):
        parse_form(body((named(b"a"), b"x" * 65_537)), HEADERS)
    long = {b"content-type": b"multipart/form-data; boundary=" + b"x" * 5000}
    with pytest.raises(InputError, match="malformed"):
        parse_form(b"", long)


@pytest.mark.parametrize("filler", [b"\r", b"\r\n", b"\r\n--x", b"\r\n--x y", b"-", b"\0"])
def test_data_like_boundaries_costs_no_more_than_its_size(filler: bytes) -> None:
    began = time.process_time()
    for size in (1 << 16, 1 << 20):
        try:
            form = parse_form(body((FILE, filler * (size // len(filler)))), HEADERS)
            assert len(form.file("file")) > size - 10
        except InferError:
            assert filler == b"\r\n--x y"
    assert time.process_time() - began < 20  # seconds; a quadratic parser takes hours


def test_a_damaged_multipart_body_parses_or_is_refused() -> None:
    good = body((named(b"model"), b"m"), (FILE, b"abc" * 20))
    generator = np.random.default_rng(1)
    for _ in range(300):
        data = bytearray(good)
        for place in generator.integers(0, len(data), 3):
            data[place] = generator.integers(0, 256)
        with contextlib.suppress(InputError, TooLargeError):
            parse_form(bytes(data[: generator.integers(1, len(data) + 1)]), HEADERS)
