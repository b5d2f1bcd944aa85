"""KServe requests whose JSON came before, byte for byte, in front of other raw tensors: it is not read again.

The JSON of a request that sends its tensors raw names inputs, types, shapes and what is wanted; a client that asks
again with tensors of the same shapes repeats it. What it says, once it was found to fit the model, is kept under it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from ..spec import TensorSpec
from .arrays import Arrays
from .types_v2 import InferRequest

MOST_FORMS, LONGEST_FORM = 256, 2048  # remembered per model at a time; bytes
Place = tuple[
    str, np.dtype, tuple[int, ...], int, int
]  # name, dtype, shape, elements, where among the raw bytes


@dataclass(frozen=True, slots=True)
class Form:
    """`wanted`: outputs, and whether each goes as raw bytes; `timeout`: seconds; `size`: raw bytes that follow."""

    request: InferRequest
    places: tuple[Place, ...]
    wanted: list[tuple[TensorSpec, bool]]
    timeout: float
    priority: int
    size: int


Forms = dict[bytes, Form]


def find(body: bytes | bytearray, split: bytes | None, forms: Forms) -> tuple[Form, Arrays] | None:
    """The form of a body whose first `split` bytes are JSON, and its tensors, views of the body."""
    if split is None or not forms or not isinstance(body, bytes) or len(split) > 4 or not split.isdigit():
        return None
    end = int(split)
    form = forms.get(body[:end])
    if form is None or len(body) != end + form.size:
        return None
    return form, {
        name: np.frombuffer(body, dtype, count, end + at).reshape(shape)
        for name, dtype, shape, count, at in form.places
    }


def learn(
    body: bytes | bytearray,
    request: InferRequest,
    arrays: Arrays,
    wanted: list[tuple[TensorSpec, bool]],
    priority: int,
    forms: Forms,
) -> None:
    """Keep it where nothing but the raw bytes can differ next time; all are forgotten when they become too many."""
    size = sum(array.nbytes for array in arrays.values())
    head = bytes(body[: len(body) - size])
    if len(head) > LONGEST_FORM or request.id is not None or sys.byteorder != "little":
        return
    places, at = list[Place](), 0
    for given in request.inputs:
        array = arrays[given.name]
        # The bytes of a bool are looked at; an empty array has none.
        if "binary_data_size" not in given.parameters or array.dtype.kind == "b" or not array.size:
            return
        places.append((given.name, array.dtype, array.shape, array.size, at))
        at += array.nbytes
    if len(forms) >= MOST_FORMS:
        forms.clear()
    timeout = request.parameters.get("timeout", 0)
    forms[head] = Form(request, tuple(places), wanted, timeout / 1e6 or float("inf"), priority, size)
