"""KServe requests that differ from an earlier one in their numbers alone: the rest of their JSON is not read again.

A client that asks again with tensors of the same shapes repeats all but the numbers: whole JSON in front of raw
tensors, or what stands before and behind the numbers of the only input. What that says, once it was found to fit the
model, is kept under its bytes; the numbers are looked at every time.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ..errors import InputError
from ..spec import TensorSpec
from .arrays import Arrays
from .layout import Layout
from .tensors import narrow
from .types_v2 import InferRequest

MOST_FORMS, LONGEST_FORM = 256, 2048  # remembered per model at a time; bytes
DATA = b'"data"'
# Its dtype, shape and elements, and where it begins among the raw bytes.
Place = tuple[TensorSpec, np.dtype, tuple[int, ...], int, int]
Wanted = list[tuple[TensorSpec, bool]]
decode_floats = msgspec.json.Decoder(list[list[float]]).decode
decode_whole = msgspec.json.Decoder(list[list[int]]).decode


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """`wanted`: outputs, and whether each goes as raw bytes; `timeout`: seconds; `size`: raw bytes that follow.
    `piece`: of an `Entry`, the sizes, key, rows, elements, bytes and priority."""

    places: tuple[Place, ...]
    wanted: Wanted
    timeout: float
    size: int
    piece: tuple[dict[str, int], Hashable, int, int, int, int]

    @property
    def rows(self) -> int:
        return self.piece[2]

    @property
    def priority(self) -> int:
        return self.piece[5]


Forms = dict[bytes | tuple[bytes, bytes], Form]


def find(body: bytes | bytearray, split: bytes | None, forms: Forms, most: int) -> tuple[Form, bytes] | None:
    """The form of a body whose first `split` bytes are JSON, or all, of `most` bytes; and its numbers, for `read`."""
    if not forms or not isinstance(body, bytes):
        return None
    if split is None:
        if len(body) > most:
            return None
        start, end = _numbers(body)
        form = forms.get((body[:start], body[end:]))
        return None if form is None else (form, body[start:end])
    if len(split) > 4 or not split.isdigit():
        return None
    end = int(split)
    form = forms.get(body[:end])
    if form is None or len(body) != end + form.size:
        return None
    return form, body[end:]


def read(form: Form, numbers: Sequence[bytes]) -> Arrays | None:
    """The tensors of some requests, behind each other along their first dimension; None where numbers of any do not
    fit: the whole way finds the words."""
    several = len(numbers)
    if form.size:
        whole = np.frombuffer(b"".join(numbers), np.uint8).reshape(several, form.size)
        found = {}
        for spec, dtype, shape, count, at in form.places:
            raw = np.ascontiguousarray(whole[:, at : at + count * dtype.itemsize])
            found[spec.name] = raw.view(dtype).reshape(_stacked(shape, several))
        return found
    ((spec, dtype, shape, count, _),) = form.places
    floats = dtype.kind == "f"
    try:
        # Each text ends with its only "]", so that no two can be taken for another two.
        values = (decode_floats if floats else decode_whole)(b"[%b]" % b",".join(numbers))
        wide = np.array(values, np.float64 if floats else np.int64)
        if wide.shape != (several, count):
            return None
        return {spec.name: narrow(wide, spec, "").reshape(_stacked(shape, several))}
    except (msgspec.DecodeError, ValueError, OverflowError, InputError):
        return None


def _stacked(shape: tuple[int, ...], several: int) -> tuple[int, ...]:
    return shape if several == 1 else (several * shape[0], *shape[1:])


def _numbers(body: bytes) -> tuple[int, int]:
    """Where the first flat list behind the first "data" begins and ends."""
    start = body.find(b"[", body.find(DATA))
    return start, body.find(b"]", start) + 1


def learn(
    body: bytes | bytearray,
    request: InferRequest,
    inputs: Sequence[tuple[TensorSpec, np.ndarray]],
    wanted: Wanted,
    priority: int,
    forms: Forms,
    layout: Layout,
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
    piece = layout.piece({spec.name: array for spec, array in inputs})
    timeout = request.parameters.get("timeout", 0)
    forms[key] = Form(tuple(places), wanted, timeout / 1e6 or float("inf"), size, (*piece, priority))
