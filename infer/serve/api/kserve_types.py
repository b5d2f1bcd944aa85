"""JSON schemas of one KServe inference request and its response."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Parameters = dict[str, Any]


class InferInput(msgspec.Struct, kw_only=True):
    """An input; `data` is flat or nested, or absent with `parameters.binary_data_size` raw bytes."""

    name: str
    datatype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=16)]
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters = {}


class InferOutput(msgspec.Struct, kw_only=True):
    """A requested output; `parameters.binary_data` asks for raw bytes."""

    name: str
    parameters: Parameters = {}


class InferRequest(msgspec.Struct, kw_only=True):
    """Inference request.

    `parameters`: timeout (µs), priority (1 goes first, 0 is the default), binary_data_output.
    """

    inputs: list[InferInput]
    outputs: list[InferOutput] | None = None
    id: str | None = None
    parameters: Parameters = {}


class InferTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An output tensor; non-finite values are the strings "NaN", "Infinity", "-Infinity"."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, int] | None = None


class InferResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Inference response.

    `parameters`: queue_us, compute_us, and batch_size, the rows of the batch that the request ran in.
    """

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, int]
    outputs: list[InferTensor]
