"""Responses of KServe inference, as JSON or raw tensors: of one request, or of several in one batch."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from ....errors import InferError
from ....spec import TensorSpec
from ...batching.infer_result import InferResult
from ...batching.tensor_engine import TensorEngine
from ...http.routing import BINARY, JSON, NonfiniteError, Response
from .kserve_tensors import count_nonfinite, datatype, to_binary, to_json

HEADER_LENGTH = b"inference-header-content-length"
RequestedOutputs = list[tuple[TensorSpec, bool]]
encode = msgspec.json.Encoder().encode
Headers = list[tuple[bytes, bytes]]


def check_finite(engine: TensorEngine, spec: TensorSpec, array: np.ndarray) -> int:
    """Count the values that are NaN or infinite; raise `NonfiniteError` where the server refuses them."""
    wrong = count_nonfinite(array, spec)
    if wrong:
        engine.metrics.nonfinite.inc(wrong)
        if engine.limits.nonfinite_error:
            raise NonfiniteError(spec.name, wrong)
    return wrong


@lru_cache(1024)
def _model(name: str, version: str) -> bytes:
    return b'{"model_name":%b,"model_version":%b,' % (encode(name), encode(version))


@lru_cache(1024)
def _tensor(spec: TensorSpec) -> bytes:
    return b'{"name":%b,"datatype":%b,"shape":' % (encode(spec.name), encode(datatype(spec)))


def _lead(engine: TensorEngine, id: str | None, answer: InferResult) -> bytes:
    return b'%b%b"parameters":{"queue_us":%d,"compute_us":%d,"batch_size":%d},"outputs":[' % (
        _model(engine.info.name, engine.info.version),
        b"" if id is None else b'"id":%b,' % encode(id),
        answer.queue_seconds * 1e6,
        answer.compute_seconds * 1e6,
        answer.batch_size,
    )


def encode_response(
    engine: TensorEngine, id: str | None, answer: InferResult, wanted: RequestedOutputs
) -> Response:
    """Encode one `InferResponse`, with cached bytes for all but its numbers. Raise `NonfiniteError`."""
    tensors, chunks = list[bytes](), list[bytes]()
    for spec, binary in wanted:
        array = output_of(answer, spec)
        wrong = check_finite(engine, spec, array)
        named = _tensor(spec), encode(array.shape)
        if binary:
            chunks.append(to_binary(array, spec))
            tensors.append(b'%b%b,"parameters":{"binary_data_size":%d}}' % (*named, len(chunks[-1])))
        else:
            values = to_json(array) if wrong else array.ravel().tolist()
            tensors.append(b'%b%b,"data":%b}' % (*named, encode(values)))
    head = b"%b%b]}" % (_lead(engine, id, answer), b",".join(tensors))
    if not chunks:
        return Response(head, media=JSON)
    return Response(b"".join([head, *chunks]), media=BINARY, headers=[(HEADER_LENGTH, b"%d" % len(head))])


def encode_responses(
    engine: TensorEngine, answer: InferResult, wanted: RequestedOutputs, count: int
) -> tuple[str, Headers, list[bytes]] | None:
    """Encode `count` responses with equal shapes at once, or return None.

    Returns media type and headers, common to all, and the bodies, as `encode_response` would. None where a
    number is not finite, or some outputs are JSON and some raw.
    """
    binary = bool(wanted) and wanted[0][1]
    named, columns = list[bytes](), list[list[bytes]]()
    for spec, raw in wanted:
        array = output_of(answer, spec)
        if raw != binary or not array.size or not array.ndim or len(array) % count:
            return None
        if count_nonfinite(array, spec):
            return None
        start = b"%b%b" % (_tensor(spec), encode((len(array) // count, *array.shape[1:])))
        if binary:
            whole = to_binary(array, spec)
            size = len(whole) // count
            columns.append([whole[at : at + size] for at in range(0, count * size, size)])
            named.append(b'%b,"parameters":{"binary_data_size":%d}}' % (start, size))
        else:
            # Lists of numbers: brackets stand between them and nowhere else.
            columns.append(encode(array.reshape(count, -1).tolist())[2:-2].split(b"],["))
            named.append(start)
    lead = _lead(engine, None, answer)
    if binary:
        head = b"%b%b]}" % (lead, b",".join(named))
        return (
            BINARY,
            [(HEADER_LENGTH, b"%d" % len(head))],
            [b"".join((head, *row)) for row in zip(*columns, strict=True)],
        )
    starts = [b'%b%b,"data":[' % (b"]}," if at else lead, start) for at, start in enumerate(named)]
    bodies = [b""] * count
    for start, column in zip(starts, columns, strict=True):
        bodies = [b"%b%b%b" % (body, start, numbers) for body, numbers in zip(bodies, column, strict=True)]
    return JSON, [], [b"%b]}]}" % body for body in bodies]


def output_of(answer: InferResult, spec: TensorSpec) -> np.ndarray:
    """Return one output of a result. Raises `InferError` where the model gave none of that name."""
    array = answer.outputs.get(spec.name)
    if array is None:
        raise InferError(f"the model gave no output {spec.name}")
    return array
