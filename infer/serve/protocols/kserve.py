"""KServe's Open Inference Protocol v2 over REST: models, health, statistics and inference on tensors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...errors import NotReadyError
from ..api import kserve_request
from ..api.kserve_tensors import DATATYPES, datatype, shape_of
from ..api.kserve_types import InferRequest, InferResponse
from ..batching.tensor_engine import TensorEngine
from ..http.error_text import error_text
from ..http.request_context import RequestContext
from ..http.routing import Dialect, Route
from ..observability.metrics import BatchStats, InferenceStats, stats_dict
from ..service import Service

EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics", "parameters", "schedule_policy"]


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


DIALECT = Dialect("kserve", lambda error: error.status, lambda error: ErrorText(error_text(error)), ErrorText)


def routes(service: Service) -> list[Route]:
    def get(path: str, out: type[Any], handler: Any, summary: str, *errors: int, open: bool = False) -> Route:
        return Route("GET", path, None, out, handler, summary, DIALECT, errors, open=open)

    table = [
        get("/v2", ServerMetadata, server, "Name, version, extensions"),
        get("/v2/health/live", Live, live, "Whether the process should live on", 503, open=True),
        get("/v2/health/ready", Ready, ready, "Whether requests would be answered", 503),
        get("/v2/models", ModelIndex, index, "The served models"),
        get("/v2/models/stats", Statistics, all_stats, "Statistics of every model"),
    ]
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        table += [
            Route(
                "POST",
                f"{path}/infer",
                InferRequest,
                InferResponse,
                infer,
                "Run the model",
                DIALECT,
                work=True,
                binary=True,
                early=early,
            ),
            get(path, ModelMetadata, metadata, "Inputs and outputs of a model", 404),
            get(f"{path}/ready", ModelReady, model_ready, "Whether a model would answer", 404, 503),
            get(f"{path}/config", ModelConfig, config, "How a model is served", 404),
            get(f"{path}/stats", Statistics, stats, "What a model has done", 404),
        ]
    return table


async def server(call: RequestContext) -> ServerMetadata:
    return ServerMetadata("infer", call.service.version, EXTENSIONS)


async def live(call: RequestContext) -> Live:
    if not call.service.healthy:
        raise NotReadyError("an engine died or is stuck")
    return Live(True)


async def ready(call: RequestContext) -> Ready:
    if not call.service.ready:
        raise NotReadyError(call.service.unready_reason)
    return Ready(True)


async def index(call: RequestContext) -> ModelIndex:
    state: Literal["READY", "UNAVAILABLE"] = "READY" if call.service.ready else "UNAVAILABLE"
    return ModelIndex([ModelState(n, e.predictor.version, state) for n, e in call.service.engines.items()])


async def metadata(call: RequestContext) -> ModelMetadata:
    model = _engine(call).predictor
    ins = [TensorMetadata(spec.name, datatype(spec), shape_of(spec)) for spec in model.inputs]
    outs = [TensorMetadata(spec.name, datatype(spec), shape_of(spec)) for spec in model.outputs]
    return ModelMetadata(model.name, [model.version], _platform(model), ins, outs)


async def model_ready(call: RequestContext) -> ModelReady:
    engine = _engine(call)
    if call.service.state != "ready" or not engine.healthy:
        raise NotReadyError(f"model {engine.predictor.name} would not answer")
    return ModelReady(engine.predictor.name, True)


async def config(call: RequestContext) -> ModelConfig:
    engine = _engine(call)
    model, batched = engine.predictor, engine.collator.batched
    skip = 1 if batched else 0
    ins, outs = (
        [ConfigTensor(spec.name, DATATYPES[spec.dtype][1], shape_of(spec)[skip:]) for spec in specs]
        for specs in (model.inputs, model.outputs)
    )
    return ModelConfig(
        name=model.name,
        platform=_platform(model),
        backend="infer",
        max_batch_size=engine.collator.max_batch if batched else 0,
        input=ins,
        output=outs,
        parameters={"task": ConfigParameter(model.task)},
        dynamic_batching=DynamicBatching(call.service.limits.max_delay_us) if batched else None,
    )


async def stats(call: RequestContext) -> Statistics:
    return Statistics([_stats(_engine(call))])


async def all_stats(call: RequestContext) -> Statistics:
    return Statistics([_stats(engine) for engine in call.service.engines.values()])


def early(call: RequestContext, piece: bytes | bytearray, whole: bool) -> None:
    """Raise `NotFoundError` or `OverloadedError` before the body is read, where it would be refused anyway."""
    kserve_request.check_admission(call, _engine(call), piece, whole)


async def infer(call: RequestContext) -> Any:
    return await kserve_request.infer(call, _engine(call))


def _engine(call: RequestContext) -> TensorEngine:
    engine = call.service.engine(call.path["model"], call.path.get("version"))
    call.model = engine.predictor.name
    return engine


def _stats(engine: TensorEngine) -> ModelStats:
    model = engine.predictor
    return ModelStats(name=model.name, version=model.version, **stats_dict(engine.metrics))


def _platform(model: Any) -> str:
    return f"infer_{getattr(model.manifest, 'backend', None) or 'model'}"
