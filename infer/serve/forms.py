"""KServe requests that differ from an earlier one in their numbers alone: the rest of their JSON is not read again.

A client that asks again with tensors of the same shapes repeats all but the numbers: whole JSON in front of raw
tensors, or what stands before and behind the numbers of the only input. What that says, once it was found to fit the
model, is kept under its bytes; the numbers are looked at every time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from ..spec import TensorSpec
from .arrays import Arrays
from .tensors import from_json
from .types_v2 import InferRequest

MOST_FORMS, LONGEST_FORM = 256, 2048  # remembered per model at a time; bytes
DATA = b'"data"'
Place = tuple[
    TensorSpec, np.dtype, tuple[int, ...], int, int
]  # dtype, shape, elements, where among the raw bytes
Wanted = list[tuple[TensorSpec, bool]]
decode_floats = msgspec.json.Decoder(list[float]).decode
decode_whole = msgspec.json.Decoder(list[int]).decode


@dataclass(frozen=True, slots=True)
class Form:
    """`wanted`: outputs, and whether each goes as raw bytes; `timeout`: seconds; `size`: raw bytes that follow."""

    places: tuple[Place, ...]
    wanted: Wanted
    timeout: float
    priority: int
    size: int


Forms = dict[bytes | tuple[bytes, bytes], Form]
Found = tuple[Form, Arrays]


def find(body: bytes | bytearray, split: bytes | None, forms: Forms, most: int) -> Found | None:
    """The form of a body whose first `split` bytes are JSON, or all, of `most` bytes; its tensors may be views of it.

    Raises `InputError` for numbers that the model does not take.
    """
    if not forms or not isinstance(body, bytes):
        return None
    if split is None:
        return _among_json(body, forms) if len(body) <= most else None
    if len(split) > 4 or not split.isdigit():
        return None
    end = int(split)
    form = forms.get(body[:end])
    if form is None or len(body) != end + form.size:
        return None
    return form, {
        spec.name: np.frombuffer(body, dtype, count, end + at).reshape(shape)
        for spec, dtype, shape, count, at in form.places
    }


def _among_json(body: bytes, forms: Forms) -> Found | None:
    start, end = _numbers(body)
    form = forms.get((body[:start], body[end:]))
    if form is None:
        return None
    ((spec, dtype, shape, _, _),) = form.places
    try:
        values = (decode_floats if dtype.kind == "f" else decode_whole)(body[start:end])
    except msgspec.DecodeError:
        return None  # the whole way finds the words
    return form, {spec.name: from_json(spec, list(shape), values, "request.inputs[0]")}


def _numbers(body: bytes) -> tuple[int, int]:
    """Where the first flat list behind the first "data" begins and ends."""
    start = body.find(b"[", body.find(DATA))
    return start, body.find(b"]", start) + 1


def learn(
    body: bytes | bytearray,
    request: InferRequest,
    inputs: Iterable[tuple[TensorSpec, np.ndarray]],
    wanted: Wanted,
    priority: int,
    forms: Forms,
) -> None:
    """Keep it where nothing but numbers can differ next time; all are forgotten when they become too many.

    `inputs`: in the order of the request.
    """
    if request.id is not None or not isinstance(body, bytes) or sys.byteorder != "little":
        return
    raw = ["binary_data_size" in given.parameters for given in request.inputs]
    key: bytes | tuple[bytes, bytes]
    places, size = list[Place](), 0
    for spec, array in inputs:
        # The bytes of a bool are looked at; an empty array has none.
        if array.dtype.kind == "b" or not array.size:
            return
        places.append((spec, array.dtype, array.shape, array.size, size))
        size += array.nbytes
    if all(raw):
        key = body[: len(body) - size]
    elif len(raw) == 1 and body.count(DATA) == 1 and b"\\" not in body:
        # That "data" is the input's then; a list of lists ends elsewhere, and does not decode.
        start, end = _numbers(body)
        key, size = (body[:start], body[end:]), 0
        if b"[" in body[start + 1 : end]:
            return
    else:
        return
    if (len(key) if isinstance(key, bytes) else sum(map(len, key))) > LONGEST_FORM:
        return
    if len(forms) >= MOST_FORMS:
        forms.clear()
    timeout = request.parameters.get("timeout", 0)
    forms[key] = Form(tuple(places), wanted, timeout / 1e6 or float("inf"), priority, size)
