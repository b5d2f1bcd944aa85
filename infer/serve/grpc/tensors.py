"""Tensors of KServe's gRPC messages: requests with raw or typed contents in, responses with raw contents out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InputError
from ..api.kserve.kserve_request import Sections
from ..api.kserve.kserve_response import RequestedOutputs, check_finite, output_of
from ..api.kserve.kserve_tensors import datatype, to_binary
from ..api.kserve.kserve_types import InferRequest, Parameters
from ..batching.infer_result import InferResult
from ..batching.tensor_engine import TensorEngine
from ..http import json_parse

# KServe datatype → field of its typed contents, the numpy type of that field, and the one of the raw bytes.
CONTENTS: dict[str, tuple[str, str, str]] = {
    "BOOL": ("bool_contents", "?", "?"),
    "INT8": ("int_contents", "<i4", "i1"),
    "INT16": ("int_contents", "<i4", "<i2"),
    "INT32": ("int_contents", "<i4", "<i4"),
    "INT64": ("int64_contents", "<i8", "<i8"),
    "UINT8": ("uint_contents", "<u4", "u1"),
    "FP32": ("fp32_contents", "<f4", "<f4"),
    "FP64": ("fp64_contents", "<f8", "<f8"),
}
TEXTS = "bytes_contents"


def read_request(message: Any) -> tuple[InferRequest, Sections]:
    """Return the request of a `ModelInferRequest`, whose outputs are raw, and the raw bytes of each input.

    Typed contents become raw bytes. Raises `InputError`.
    """
    inputs, raw = message.inputs, message.raw_input_contents
    if raw and len(raw) != len(inputs):
        raise InputError(f"expected raw_input_contents of {len(inputs)} inputs, got {len(raw)}")
    given = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": _parameters(tensor.parameters, f"request.inputs[{index}]"),
            }
            for index, tensor in enumerate(inputs)
        ],
        "outputs": [
            {
                "name": output.name,
                "parameters": {
                    **_parameters(output.parameters, f"request.outputs[{index}]"),
                    "binary_data": True,
                },
            }
            for index, output in enumerate(message.outputs)
        ],
        "id": message.id or None,
        "parameters": {**_parameters(message.parameters, "request"), "binary_data_output": True},
    }
    sections: Sections = []
    for index, tensor in enumerate(inputs):
        where = f"request.inputs[{index}]"
        typed = _typed_bytes(tensor, where)
        if raw and typed is not None:
            raise InputError("data is given twice, as raw and as typed contents", where=where)
        if typed is None and 0 in tensor.shape:
            typed = b""
        section = raw[index] if raw else typed
        sections.append(None if section is None else memoryview(section))
    return json_parse.convert(given, InferRequest), sections


def _parameters(named: Mapping[str, Any], where: str) -> Parameters:
    values: Parameters = {}
    for name, parameter in named.items():
        chosen = parameter.WhichOneof("parameter_choice")
        if chosen is None:
            raise InputError(f"parameter {name[:64]} has no value", where=f"{where}.parameters")
        values[name] = getattr(parameter, chosen)
    return values


def _typed_bytes(tensor: Any, where: str) -> bytes | None:
    """Return the raw bytes of typed contents, None where there are none."""
    filled = {field.name: values for field, values in tensor.contents.ListFields()}
    if not filled:
        return None
    kind = tensor.datatype
    name, wide, to = CONTENTS.get(kind, (TEXTS, "", ""))
    if kind in ("FP16", "BF16"):
        raise InputError(f"{kind} has no typed contents", where=where, hint="Send it in raw_input_contents")
    if list(filled) != [name]:
        raise InputError(f"expected {name} for {kind[:16]}, got {', '.join(filled)}", where=where)
    values = filled[name]
    if not wide:
        return b"".join(b"%b%b" % (len(text).to_bytes(4, "little"), text) for text in values)
    array = np.fromiter(values, wide, len(values))
    narrow = array.astype(to)
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        raise InputError(f"a value does not fit into {kind}", where=where)
    return narrow.tobytes()


def fill_response(
    message: Any, engine: TensorEngine, id: str | None, result: InferResult, wanted: RequestedOutputs
) -> None:
    """Fill a `ModelInferResponse`. Raises `NonfiniteError` where the server refuses such outputs."""
    message.model_name, message.model_version, message.id = engine.info.name, engine.info.version, id or ""
    parameters = message.parameters
    parameters["queue_us"].int64_param = int(result.queue_seconds * 1e6)
    parameters["compute_us"].int64_param = int(result.compute_seconds * 1e6)
    parameters["batch_size"].int64_param = result.batch_size
    for spec, _ in wanted:
        array = output_of(result, spec)
        check_finite(engine, spec, array)
        message.outputs.add(name=spec.name, datatype=datatype(spec), shape=array.shape)
        message.raw_output_contents.append(to_binary(array, spec))
