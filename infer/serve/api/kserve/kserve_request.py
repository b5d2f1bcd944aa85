"""One KServe inference request: tensors that are checked and run, whichever wire brought them, and the wire of HTTP.

`Inference-Header-Content-Length` alone tells where JSON ends and raw tensors begin; Content-Type does not.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from ....errors import InputError
from ....spec import TensorSpec
from ...batching import text_inputs
from ...batching.collate import Arrays
from ...batching.infer_result import InferResult
from ...batching.sequences import SequenceCall
from ...batching.tensor_engine import DEFAULT_PRIORITY, TensorEngine
from ...http.request_context import RequestContext
from ...http.routing import Response
from .kserve_response import HEADER_LENGTH, RequestedOutputs, encode_response
from .kserve_tensors import (
    BINARY_ONLY,
    DATATYPES,
    datatype,
    from_binary,
    from_json,
    shape_of,
    texts_from_binary,
    texts_from_json,
)
from .kserve_types import InferInput, InferRequest, Parameters

SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
MOST_ID = 128
TEXT = "text"  # a BYTES input of this name is tokenised
Sections = list[memoryview | None]  # raw bytes of each input; None where its data is in the request itself
TensorRequest = tuple[InferRequest, list[tuple[TensorSpec, np.ndarray]], RequestedOutputs, int]


def find_engine(context: RequestContext) -> TensorEngine:
    """Return the engine of the model in the path."""
    engine = context.service.engine(context.path["model"], context.path.get("version"))
    context.model = engine.info.name
    return engine


async def infer(context: RequestContext) -> Response:
    """Run one request of HTTP; raise `InputError` for anything that does not fit the model."""
    engine = find_engine(context)
    request, raw = _read(context, engine)
    result, wanted = await run(context, engine, request, _sections(request, raw))
    return encode_response(engine, request.id, result, wanted)


async def run(
    context: RequestContext, engine: TensorEngine, request: InferRequest, sections: Sections
) -> tuple[InferResult, RequestedOutputs]:
    """Run one request, whichever wire it came over; return its result and the outputs that it asks for.

    Raises `InputError` for anything that does not fit the model, and what the engine raises.
    """
    tenant = context.queue_tenant
    timeout, priority = _timeout_and_priority(context, request)
    wanted = _wanted(request, engine)
    call = _sequence(request.parameters)
    if _is_text(request, engine):
        if call is not None:
            raise InputError(
                "parameter sequence_id is not supported with texts", where="request.parameters.sequence_id"
            )
        most = context.service.limits.max_queue_rows
        arrays = await text_inputs.tokenize(engine, _texts(request, sections), max_texts=most)
        engine.metrics.prompt_tokens.inc(text_inputs.count_tokens(arrays))
        result = await text_inputs.infer_rows(
            engine, arrays, timeout=timeout, priority=priority, tenant=tenant
        )
    else:
        arrays = _arrays(request, sections, engine)
        if call is None:
            result = await engine.infer(arrays, timeout=timeout, priority=priority, tenant=tenant)
        else:
            result = await engine.infer_in_sequence(
                arrays, call, context.tenant, timeout=timeout, priority=priority, tenant=tenant
            )
            if not request.outputs:  # the server carries the states
                wanted = [one for one in wanted if one[0].name not in engine.collator.states.values()]
    context.measure = result.timings
    return result, wanted


def read_tensors(context: RequestContext, engine: TensorEngine) -> TensorRequest | None:
    """Return the decoded request, its inputs, the requested outputs and its priority; None for texts, and for
    what is not coalesced: sequences, and models whose rows do not lie along the first axis.

    Raises as `infer` does.
    """
    request, raw = _read(context, engine)
    if _is_text(request, engine):
        return None
    if not engine.collator.plain or set(SEQUENCE) & set(request.parameters):
        return None
    _, priority = _timeout_and_priority(context, request)
    wanted, arrays = _wanted(request, engine), _arrays(request, _sections(request, raw), engine)
    specs = {spec.name: spec for spec in engine.info.inputs}
    return request, [(specs[name], array) for name, array in arrays.items()], wanted, priority


def precheck(context: RequestContext, piece: bytes | bytearray, whole: bool) -> None:
    """Raise `NotFoundError`, or `OverloadedError` where any request of usual priority would be refused now.

    A body that may ask for a higher priority is read first.
    """
    engine = find_engine(context)
    header = context.headers.get(HEADER_LENGTH, b"")
    size = int(header) if header.isdigit() and len(header) <= 12 else len(piece) + (not whole)
    if size <= len(piece) and piece.find(b'"priority"', 0, size) < 0:
        engine.check_admission(timeout=context.timeout(), tenant=context.queue_tenant)


def _read(context: RequestContext, engine: TensorEngine) -> tuple[InferRequest, memoryview]:
    body, header = memoryview(context.body), context.headers.get(HEADER_LENGTH)
    if header is None:
        return context.json(InferRequest, body), body[len(body) :]
    if not header.isdigit() or len(header) > 12 or int(header) > len(body):
        raise InputError(
            f"expected 0 to {len(body)}, the length of the body", where="Inference-Header-Content-Length"
        )
    if int(header) == 0:
        return _raw_request(engine, len(body)), body
    return context.json(InferRequest, body[: int(header)]), body[int(header) :]


def _raw_request(engine: TensorEngine, size: int) -> InferRequest:
    """Return the request for a body that is the raw bytes of the only input.

    At most one size may be unknown once the batch is 1.
    """
    specs = engine.info.inputs
    if len(specs) != 1:
        raise InputError(f"a body of raw bytes needs a model with one input, this one has {len(specs)}")
    spec, shape = specs[0], shape_of(specs[0])
    if shape.count(-1) > 1 and spec.batch_axis is not None:
        shape[spec.batch_axis] = 1
    if shape.count(-1) > 1:
        raise InputError(
            "raw bytes leave more than one size undetermined; send the shape in JSON", where=spec.name
        )
    fixed = math.prod(n for n in shape if n >= 0) * DATATYPES[spec.dtype][2].itemsize
    if -1 in shape:
        shape[shape.index(-1)] = size // fixed
    given = InferInput(
        name=spec.name, datatype=datatype(spec), shape=shape, parameters={"binary_data_size": size}
    )
    return InferRequest(inputs=[given], parameters={"binary_data_output": True})


def _timeout_and_priority(context: RequestContext, request: InferRequest) -> tuple[float, int]:
    """Return timeout in seconds and priority; raise `InputError` for unsupported parameters."""
    refused = [
        key
        for key in request.parameters
        if key.startswith(("sequence_", "shared_memory")) and key not in SEQUENCE
    ]
    if refused:
        raise InputError(f"parameter {refused[0][:64]} is not supported", where="request.parameters")
    for index, tensor in enumerate(request.inputs):
        if any(key.startswith("shared_memory") for key in tensor.parameters):
            raise InputError("shared memory is not supported", where=f"request.inputs[{index}]")
    timeout = _number(request.parameters, "timeout")
    priority = _number(request.parameters, "priority")
    seconds = min(timeout / 1e6, context.timeout()) if timeout else context.timeout()
    return seconds, min(priority, 255) or DEFAULT_PRIORITY


def _is_text(request: InferRequest, engine: TensorEngine) -> bool:
    return engine.takes_text and any(given.name == TEXT for given in request.inputs)


def _sequence(parameters: Parameters) -> SequenceCall | None:
    """Return the sequence that a request belongs to; None where it names none, which an id of 0 does too."""
    id, where = parameters.get("sequence_id", 0), "request.parameters.sequence_id"
    number = isinstance(id, int) and not isinstance(id, bool) and 0 <= id < 2**64
    if not number and not (isinstance(id, str) and 0 < len(id) <= MOST_ID):
        raise InputError(f"expected a number from 1 to 2^64 - 1, or 1 to {MOST_ID} characters", where=where)
    start, end = (
        _flag(parameters, name, False, f"request.parameters.{name}")
        for name in ("sequence_start", "sequence_end")
    )
    if not id and (start or end):
        raise InputError("expected a sequence_id beside sequence_start and sequence_end", where=where)
    return SequenceCall(id, start, end) if id else None


def _number(parameters: Parameters, name: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise InputError(
            f"expected a whole number, 0 or more, for {name}", where=f"request.parameters.{name}"
        )
    return value


def _flag(parameters: Parameters, name: str, default: bool, where: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InputError(f"expected true or false for {name}", where=where)
    return value


def _wanted(request: InferRequest, engine: TensorEngine) -> list[tuple[TensorSpec, bool]]:
    """Return the requested outputs in order, each with a flag for raw bytes."""
    specs = engine.collator.outputs
    binary = _flag(request.parameters, "binary_data_output", False, "request.parameters")
    if not request.outputs:
        chosen = [(spec, binary) for spec in specs.values()]
    else:
        chosen = []
        for index, output in enumerate(request.outputs):
            where = f"request.outputs[{index}]"
            if output.name not in specs or any(spec.name == output.name for spec, _ in chosen):
                raise InputError(f"expected each of {', '.join(specs)} at most once", where=where)
            if refused := {"classification", "shared_memory_region"} & set(output.parameters):
                raise InputError(f"parameter {min(refused)} is not supported", where=where)
            chosen.append((specs[output.name], _flag(output.parameters, "binary_data", binary, where)))
    for spec, raw in chosen:
        if not raw and spec.dtype in BINARY_ONLY:
            raise InputError(
                f"output {spec.name} is {datatype(spec)}, which JSON can't carry", hint="Ask for binary data"
            )
    return chosen


def _sections(request: InferRequest, raw: memoryview) -> Sections:
    """Return each input's raw bytes, or None where the data is in the JSON; together they are all of `raw`."""
    at, sections = 0, Sections()
    for index, given in enumerate(request.inputs):
        where = f"request.inputs[{index}]"
        if "binary_data_size" not in given.parameters:
            sections.append(None)
            continue
        size = _number(given.parameters, "binary_data_size")
        if given.data is not msgspec.UNSET:
            raise InputError("data is given twice, in JSON and as raw bytes", where=where)
        if at + size > len(raw):
            raise InputError(f"{size} raw bytes are announced, {len(raw) - at} are left", where=where)
        sections.append(raw[at : at + size])
        at += size
    if at != len(raw):
        raise InputError(f"{len(raw) - at} bytes follow the last input")
    return sections


def _arrays(request: InferRequest, sections: Sections, engine: TensorEngine) -> Arrays:
    specs = {spec.name: spec for spec in engine.info.inputs}
    arrays: Arrays = {}
    for index, (given, section) in enumerate(zip(request.inputs, sections, strict=True)):
        where = f"request.inputs[{index}]"
        spec = specs.get(given.name)
        if spec is None or given.name in arrays:
            known = ", ".join(str(spec) for spec in specs.values())
            raise InputError(
                f"{'no' if spec is None else 'more than one'} such input; expected {known}", where=where
            )
        if given.datatype != datatype(spec):
            raise InputError(f"expected {datatype(spec)} for {spec}, got {given.datatype[:16]}", where=where)
        if len(given.shape) != len(spec.shape):
            raise InputError(f"expected input {spec}, got {given.datatype} {given.shape}", where=where)
        if section is not None:
            arrays[given.name] = from_binary(spec, given.shape, section, where)
        elif given.data is msgspec.UNSET:
            raise InputError(f"no data for input {spec}", where=where)
        else:
            arrays[given.name] = from_json(spec, given.shape, given.data, where)
    return arrays


def _texts(request: InferRequest, sections: Sections) -> list[str]:
    given, where = request.inputs[0], "request.inputs[0]"
    if len(request.inputs) != 1 or given.datatype != "BYTES":
        raise InputError(f"expected {TEXT!r} as BYTES and no other input", where=where)
    (section,) = sections
    if section is not None:
        return texts_from_binary(given.shape, section, where)
    if given.data is msgspec.UNSET:
        raise InputError(f"no data for input {TEXT!r}", where=where)
    return texts_from_json(given.shape, given.data, where)
