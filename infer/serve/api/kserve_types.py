"""The JSON of one KServe inference, as it comes and as it goes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Parameters = dict[str, Any]


class InferInput(msgspec.Struct, kw_only=True):
    """`data`: flat or nested; left out when `parameters.binary_data_size` says how many raw bytes follow."""

    name: str
    datatype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=16)]
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: Parameters = {}


class InferOutput(msgspec.Struct, kw_only=True):
    """An output that is wanted; `parameters.binary_data` asks for raw bytes."""

    name: str
    parameters: Parameters = {}


class InferRequest(msgspec.Struct, kw_only=True):
    """`parameters`: timeout (µs), priority (1 goes first, 0 is the default), binary_data_output."""

    inputs: list[InferInput]
    outputs: list[InferOutput] | None = None
    id: str | None = None
    parameters: Parameters = {}


class InferTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Values that are not finite are the strings "NaN", "Infinity", "-Infinity"."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, int] | None = None


class InferResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`parameters`: queue_us, compute_us, and batch_size, the rows of the batch that the request ran in."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, int]
    outputs: list[InferTensor]
