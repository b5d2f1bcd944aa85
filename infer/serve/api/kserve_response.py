"""Answers of KServe inference, as JSON or raw tensors: of one request, or of several that were alike."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from ...errors import InferError
from ...spec import TensorSpec
from ..batching.results import InferResult
from ..batching.tensor_engine import TensorEngine
from ..http.routing import BINARY, JSON, NonfiniteError, Response
from .kserve_tensors import count_nonfinite, datatype, to_binary, to_json

SPLIT = b"inference-header-content-length"
Wanted = list[tuple[TensorSpec, bool]]
encode = msgspec.json.Encoder().encode


def check_finite(engine: TensorEngine, spec: TensorSpec, array: np.ndarray) -> int:
    """Count the values that are NaN or infinite; raises `NonfiniteError` where the server refuses them."""
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
        _model(engine.predictor.name, engine.predictor.version),
        b"" if id is None else b'"id":%b,' % encode(id),
        answer.queue_seconds * 1e6,
        answer.compute_seconds * 1e6,
        answer.batch_size,
    )


def write(engine: TensorEngine, id: str | None, answer: InferResult, wanted: Wanted) -> Response:
    """As `InferResponse`, of which nothing but numbers differs from answer to answer. Raises `NonfiniteError`."""
    tensors, chunks = list[bytes](), list[bytes]()
    for spec, binary in wanted:
        array = _output(answer, spec)
        wrong = check_finite(engine, spec, array)
        named = _tensor(spec), encode(array.shape)
        if binary:
            chunks.append(to_binary(array, spec))
            tensors.append(b'%b%b,"parameters":{"binary_data_size":%d}}' % (*named, len(chunks[-1])))
        else:
            values = to_json(array)[0] if wrong else array.ravel().tolist()
            tensors.append(b'%b%b,"data":%b}' % (*named, encode(values)))
    head = b"%b%b]}" % (_lead(engine, id, answer), b",".join(tensors))
    if not chunks:
        return Response(head, media=JSON)
    return Response(b"".join([head, *chunks]), media=BINARY, headers=[(SPLIT, b"%d" % len(head))])


Headers = list[tuple[bytes, bytes]]


def write_each(
    engine: TensorEngine, answer: InferResult, wanted: Wanted, count: int
) -> tuple[str, Headers, list[bytes]] | None:
    """What `write` gives for each of `count` requests whose rows these are: media type and headers, which are the same
    for all, and the bodies. None where some numbers are not finite, or some outputs go as JSON and some not."""
    binary = bool(wanted) and wanted[0][1]
    named, columns = list[bytes](), list[list[bytes]]()
    for spec, raw in wanted:
        array = _output(answer, spec)
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
            [(SPLIT, b"%d" % len(head))],
            [b"".join((head, *row)) for row in zip(*columns, strict=True)],
        )
    starts = [b'%b%b,"data":[' % (b"]}," if at else lead, start) for at, start in enumerate(named)]
    bodies = [b""] * count
    for start, column in zip(starts, columns, strict=True):
        bodies = [b"%b%b%b" % (body, start, numbers) for body, numbers in zip(bodies, column, strict=True)]
    return JSON, [], [b"%b]}]}" % body for body in bodies]


def _output(answer: InferResult, spec: TensorSpec) -> np.ndarray:
    array = answer.outputs.get(spec.name)
    if array is None:
        raise InferError(f"the model gave no output {spec.name}")
    return array
