"""Units of budgets: parsed as meant, refused where they could mean two things."""

from __future__ import annotations

import pytest

from infer.errors import UsageError
from infer.options import values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5ms", 0.005),
        ("5 ms", 0.005),
        ("1.5s", 1.5),
        ("10min", 600),
        ("1h", 3600),
        (".5s", 0.5),
        ("250us", 2.5e-4),
    ],
)
def test_a_time_is_parsed_with_its_unit(text: str, seconds: float) -> None:
    assert values.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "5m", "ms", "-5ms", "0ms", "5 parsecs", "", "nan s", "1e400s"])
def test_a_time_without_a_clear_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected a time"):
        values.parse_seconds(text)


@pytest.mark.parametrize("seconds", [0.005, 600.0, 3600.0, 1.5, 0.00123, 1 / 3, 5400.0])
def test_a_formatted_time_is_parsed_to_the_same(seconds: float) -> None:
    assert values.parse_seconds(values.format_seconds(seconds)) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("size", [1, 999, 300_000_000, 2**30, 123_456_789])
def test_a_formatted_size_is_parsed_to_the_same(size: int) -> None:
    assert values.parse_bytes(values.format_bytes(size)) == size


def test_a_space_collects_values_by_name() -> None:
    found = values.parse_space(["backend=ort,eager", "kv-dtype=int8", "backend=inductor,ort"])
    assert found == {"backend": ("ort", "eager", "inductor"), "kv_dtype": ("int8",)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("backends=ort", "no part of --space named 'backends'. Known: .* Did you mean backend"),
        ("backend", "expected NAME=VALUES, got 'backend'"),
        ("backend=", "expected NAME=VALUES"),
        ("threads=two", "expected a number of threads, got 'two'"),
        ("bits=0.5", "expected bits per weight between 1 and 32, got '0.5'"),
    ],
)
def test_a_wrong_space_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        values.parse_space([text])


@pytest.mark.parametrize("text", ["8", "x8", "0x5", "8x0", "8x", "-1x4"])
def test_sequences_that_are_no_product_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected COUNTxTOKENS"):
        values.parse_sequences(text)
