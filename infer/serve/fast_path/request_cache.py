"""Caches of request heads and of request bodies without their numbers, so that both are parsed once.

The cached result of a head is that of parser, limits, API keys and router. A client that sends tensors of the same
shapes again repeats all bytes of the body but the numbers: the whole JSON before raw tensor bytes, or the JSON before
and after the numbers of a single input. A `BodyTemplate` is made of a body that was checked against the model, and
found by these bytes; the numbers are checked every time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from starlette.routing import Match

from ...errors import InputError
from ...spec import TensorSpec
from ..api.kserve_response import HEADER_LENGTH, RequestedOutputs
from ..api.kserve_tensors import narrow
from ..api.kserve_types import InferRequest
from ..batching.collate import Arrays, Collator, RequestSize
from ..http.app import App, Endpoint, Scope
from ..http.http_protocol import HttpProtocol
from ..http.request_context import queue_tenant_of, requested_timeout
from ..http.routing import Route

MAX_HEADS, MAX_HEAD_BYTES, MAX_BODY_BYTES = 1024, 2048, 16 << 10
# Heads with one of these differ each time, or ask for what only the ordinary path does.
EXCLUDED = frozenset((b"x-request-id", b"traceparent", b"tracestate", b"expect", b"content-encoding"))
MAX_STUDIES = 8
MAX_TEMPLATES, MAX_TEMPLATE_BYTES = 256, 2048  # per model; bytes of each
DATA = b'"data"'
# Spec, dtype, shape and elements of one input, and its offset in the raw bytes.
Place = tuple[TensorSpec, np.dtype, tuple[int, ...], int, int]
decode_floats = msgspec.json.Decoder(list[list[float]]).decode
decode_integers = msgspec.json.Decoder(list[list[int]]).decode


@dataclass(slots=True, eq=False)
class KnownHead:
    """Head of an inference request.

    `head`: its bytes; `length`: bytes of the body; `split`: of these, bytes of JSON before raw tensors, as the
    header says it; `timeout`: seconds; `tenant`: see `queue_tenant_of`; `studies`: how many more bodies are looked at
    for a template.
    """

    head: bytes
    endpoint: Endpoint
    route: Route
    path: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    length: int
    split: bytes | None
    timeout: float
    tenant: str
    studies: int = MAX_STUDIES


class HeaderCache:
    """Heads of well-formed inference requests; cleared when full."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: dict[bytes, KnownHead] = {}
        self.get = self._known.get

    def learn(self, head: bytes, connection: HttpProtocol, length: int) -> None:
        """Add a head whose requests may be coalesced: right API key, inference route, short body."""
        service, headers = self._app.service, dict(connection.headers)
        limits, split = service.limits, headers.get(HEADER_LENGTH)
        if split is None and length > limits.max_json_bytes:
            return
        if len(head) > MAX_HEAD_BYTES or length > min(MAX_BODY_BYTES, limits.max_body_bytes):
            return
        if not EXCLUDED.isdisjoint(headers) or (service.keys is not None and not service.keys.admit(headers)):
            return
        found = self._find(connection)
        if found is None:
            return
        try:
            timeout = requested_timeout(headers) or limits.timeout_seconds
        except InputError:
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        tenant = queue_tenant_of(service, headers)
        self._known[head] = KnownHead(head, *found, headers, length, split, timeout, tenant)

    def _find(self, connection: HttpProtocol) -> tuple[Endpoint, Route, Mapping[str, str]] | None:
        """Return the inference route of a head, with its path parameters."""
        scope: Scope = connection.scope  # type: ignore[assignment]
        for address in self._app.routes:
            match, found = address.matches(scope)
            if match is Match.FULL:
                endpoint: Endpoint = found["endpoint"]
                route = endpoint.methods.get(scope["method"])
                if route is None or route.In is not InferRequest:
                    return None
                return endpoint, route, found["path_params"]
        return None


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
        if request.id is not None or sys.byteorder != "little":
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
