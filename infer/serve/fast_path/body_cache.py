"""Cache of request bodies without their numbers, so that their JSON is parsed once.

A client that sends tensors of the same shapes again repeats all bytes of the body but the numbers: the whole JSON
before raw tensor bytes, or the JSON before and after the numbers of a single input. A `BodyTemplate` is made of a
body that was checked against the model, and found by these bytes; the numbers are checked every time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ...errors import InputError
from ...spec import TensorSpec
from ..api.kserve.kserve_response import RequestedOutputs
from ..api.kserve.kserve_tensors import narrow
from ..api.kserve.kserve_types import InferRequest
from ..batching.collate import Arrays, Collator, RequestSize

MAX_TEMPLATES, MAX_TEMPLATE_BYTES = 256, 2048  # per model; bytes of each
DATA = b'"data"'
# Spec, dtype, shape and elements of one input, and its offset in the raw bytes.
Place = tuple[TensorSpec, np.dtype, tuple[int, ...], int, int]
decode_floats = msgspec.json.Decoder(list[list[float]]).decode
decode_integers = msgspec.json.Decoder(list[list[int]]).decode


@dataclass(frozen=True, slots=True, eq=False)
class BodyTemplate:
    """Request without its numbers.

    `outputs`: requested outputs, and whether each is sent as raw bytes; `timeout`: seconds; `size`: raw bytes after the
    JSON, 0 if the numbers are in it; `piece`: result of `Collator.measure`.
    """

    places: tuple[Place, ...]
    outputs: RequestedOutputs
    timeout: float
    size: int
    piece: RequestSize
    priority: int

    @property
    def rows(self) -> int:
        return self.piece.rows

    def read(self, numbers: Sequence[bytes]) -> Arrays | None:
        """Decode the tensors of requests, concatenated along their first dimension; None if any numbers do not fit."""
        several = len(numbers)
        if self.size:
            whole = np.frombuffer(b"".join(numbers), np.uint8).reshape(several, self.size)
            arrays = {}
            for spec, dtype, shape, count, at in self.places:
                raw = np.ascontiguousarray(whole[:, at : at + count * dtype.itemsize])
                arrays[spec.name] = raw.view(dtype).reshape(_stacked(shape, several))
            return arrays
        ((spec, dtype, shape, count, _),) = self.places
        floats = dtype.kind == "f"
        try:
            # Each text ends with its only "]", so that no two can be taken for another two.
            values = (decode_floats if floats else decode_integers)(b"[%b]" % b",".join(numbers))
            wide = np.array(values, np.float64 if floats else np.int64)
            if wide.shape != (several, count):
                return None
            return {spec.name: narrow(wide, spec, "").reshape(_stacked(shape, several))}
        except (msgspec.DecodeError, ValueError, OverflowError, InputError):
            return None


class BodyCache:
    """Templates of one model; cleared when full."""

    def __init__(self, layout: Collator) -> None:
        self._collator = layout
        self.templates: dict[bytes | tuple[bytes, bytes], BodyTemplate] = {}

    def find(self, body: bytes, split: bytes | None) -> tuple[BodyTemplate, bytes] | None:
        """Return the template of a body and its numbers, for `read`. `split`: bytes of JSON, None for all."""
        templates = self.templates
        if not templates:
            return None
        if split is None:
            start, end = _numbers(body)
            template = templates.get((body[:start], body[end:]))
            return None if template is None else (template, body[start:end])
        if len(split) > 5 or not split.isdigit():
            return None
        end = int(split)
        template = templates.get(body[:end])
        if template is None or len(body) != end + template.size:
            return None
        return template, body[end:]

    def learn(
        self,
        body: bytes,
        request: InferRequest,
        inputs: Sequence[tuple[TensorSpec, np.ndarray]],
        outputs: RequestedOutputs,
        priority: int,
    ) -> None:
        """Add the template of a body, unless more than its numbers could differ next time.

        `inputs`: checked tensors, in the order of the body.
        """
        if request.id is not None or sys.byteorder != "little" or not self._collator.plain:
            return
        places, size = list[Place](), 0
        for spec, array in inputs:
            # The bytes of a bool are checked; an empty array has none.
            if array.dtype.kind == "b" or not array.size:
                return
            places.append((spec, array.dtype, array.shape, array.size, size))
            size += array.nbytes
        found = _key(body, request, size)
        if found is None:
            return
        key, size = found
        if (len(key) if isinstance(key, bytes) else sum(map(len, key))) > MAX_TEMPLATE_BYTES:
            return
        if len(self.templates) >= MAX_TEMPLATES:
            self.templates.clear()
        piece = self._collator.measure({spec.name: array for spec, array in inputs})
        timeout = request.parameters.get("timeout", 0) / 1e6 or float("inf")
        self.templates[key] = BodyTemplate(tuple(places), outputs, timeout, size, piece, priority)


def _key(body: bytes, request: InferRequest, size: int) -> tuple[bytes | tuple[bytes, bytes], int] | None:
    """Return the constant bytes of a body with `size` tensor bytes, and how many of these follow the JSON."""
    raw = ["binary_data_size" in given.parameters for given in request.inputs]
    if all(raw):
        return body[: len(body) - size], size
    if len(raw) != 1 or body.count(DATA) != 1 or b"\\" in body:
        return None
    # That "data" is the input's; a list of lists ends elsewhere, and does not decode.
    start, end = _numbers(body)
    return None if b"[" in body[start + 1 : end] else ((body[:start], body[end:]), 0)


def _stacked(shape: tuple[int, ...], several: int) -> tuple[int, ...]:
    return shape if several == 1 else (several * shape[0], *shape[1:])


def _numbers(body: bytes) -> tuple[int, int]:
    """Return the bounds of the first flat list after the first "data"."""
    start = body.find(b"[", body.find(DATA))
    return start, body.find(b"]", start) + 1
