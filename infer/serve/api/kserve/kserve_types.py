"""JSON schemas of KServe v2: inference, and the metadata, configuration and statistics of models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...observability.metrics import BatchStats, InferenceStats

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

    `parameters`: timeout (µs), priority (1 goes first, 0 is the default), binary_data_output; of a stateful model
    sequence_id (a number or a text), sequence_start, sequence_end.
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


class ErrorText(msgspec.Struct):
    """Error body: one text."""

    error: str


class ServerMetadata(msgspec.Struct):
    name: str
    version: str
    extensions: list[str]


class Live(msgspec.Struct):
    live: bool


class Ready(msgspec.Struct):
    ready: bool


class ModelReady(msgspec.Struct):
    name: str
    ready: bool


class ModelState(msgspec.Struct):
    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]


class ModelIndex(msgspec.Struct):
    models: list[ModelState]


class TensorMetadata(msgspec.Struct):
    """Metadata of an input or output; a dynamic size is -1."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfigTensor(msgspec.Struct):
    """Triton's configuration of a tensor, without the batch dimension where the model has one."""

    name: str
    data_type: str
    dims: list[int]


class ConfigParameter(msgspec.Struct):
    string_value: str


class DynamicBatching(msgspec.Struct):
    max_queue_delay_microseconds: int


class ModelConfig(msgspec.Struct, omit_defaults=True):
    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfigTensor]
    output: list[ConfigTensor]
    parameters: dict[str, ConfigParameter]
    dynamic_batching: DynamicBatching | None = None


class ModelStats(msgspec.Struct):
    """Triton's statistics: counts and nanoseconds; `last_inference` in milliseconds since 1970."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStats
    batch_stats: list[BatchStats]


class Statistics(msgspec.Struct):
    model_stats: list[ModelStats]


class IndexRequest(msgspec.Struct):
    """Body of the index route; `ready`: list ready models only."""

    ready: bool = False


class ChangeRequest(msgspec.Struct):
    """Body of load and unload; a model has no parameters that can be set."""

    parameters: dict[str, Any] = {}
