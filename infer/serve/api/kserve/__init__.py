"""KServe's Open Inference Protocol v2 over REST: models, health, statistics and inference on tensors.

`kserve_repository` has the routes of the model repository extension, which are there with --allow-reload.
"""

from __future__ import annotations

from typing import Any, Literal

from ....errors import NotReadyError
from ...batching.tensor_engine import TensorEngine
from ...http.request_context import RequestContext
from ...http.routing import ErrorFormat, Handler, Route, error_text
from ...observability.metrics import stats_dict
from ...service import Service
from .kserve_request import find_engine, infer, precheck
from .kserve_tensors import DATATYPES, datatype, shape_of
from .kserve_types import (
    ConfigParameter,
    ConfigTensor,
    DynamicBatching,
    ErrorText,
    InferRequest,
    InferResponse,
    Live,
    ModelConfig,
    ModelIndex,
    ModelMetadata,
    ModelReady,
    ModelState,
    ModelStats,
    Ready,
    ServerMetadata,
    Statistics,
    TensorMetadata,
)

EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "statistics",
    "parameters",
    "schedule_policy",
    "sequence",
]


ERROR_FORMAT = ErrorFormat("kserve", lambda error, _: ErrorText(error_text(error)), ErrorText)


def routes(service: Service) -> list[Route]:
    def get(
        path: str, out: type[Any], handler: Handler, summary: str, *errors: int, open: bool = False
    ) -> Route:
        return Route("GET", path, None, out, handler, summary, ERROR_FORMAT, errors, open=open)

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
                ERROR_FORMAT,
                work=True,
                binary=True,
                precheck=precheck,
            ),
            get(path, ModelMetadata, metadata, "Inputs and outputs of a model", 404),
            get(f"{path}/ready", ModelReady, model_ready, "Whether a model would answer", 404, 503),
            get(f"{path}/config", ModelConfig, config, "How a model is served", 404),
            get(f"{path}/stats", Statistics, stats, "What a model has done", 404),
        ]
    return table


async def server(context: RequestContext) -> ServerMetadata:
    return ServerMetadata("infer", context.service.version, EXTENSIONS)


async def live(context: RequestContext) -> Live:
    if not context.service.healthy:
        raise NotReadyError("an engine died or is stuck")
    return Live(True)


async def ready(context: RequestContext) -> Ready:
    if not context.service.ready:
        raise NotReadyError(context.service.unready_reason)
    return Ready(True)


async def index(context: RequestContext) -> ModelIndex:
    state: Literal["READY", "UNAVAILABLE"] = "READY" if context.service.ready else "UNAVAILABLE"
    return ModelIndex([ModelState(n, e.info.version, state) for n, e in context.service.engines.items()])


async def metadata(context: RequestContext) -> ModelMetadata:
    model = find_engine(context).info
    ins = [TensorMetadata(spec.name, datatype(spec), shape_of(spec)) for spec in model.inputs]
    outs = [TensorMetadata(spec.name, datatype(spec), shape_of(spec)) for spec in model.outputs]
    return ModelMetadata(model.name, [model.version], f"infer_{model.backend}", ins, outs)


async def model_ready(context: RequestContext) -> ModelReady:
    engine = find_engine(context)
    if context.service.state != "ready" or not engine.healthy:
        raise NotReadyError(f"model {engine.info.name} would not answer")
    return ModelReady(engine.info.name, True)


async def config(context: RequestContext) -> ModelConfig:
    engine = find_engine(context)
    model, batched = engine.info, engine.collator.batched
    along_first = (
        batched and engine.collator.plain
    )  # `dims` leave out the axis of `max_batch_size`, the first
    skip = 1 if along_first else 0
    ins, outs = (
        [ConfigTensor(spec.name, DATATYPES[spec.dtype][1], shape_of(spec)[skip:]) for spec in specs]
        for specs in (model.inputs, model.outputs)
    )
    return ModelConfig(
        name=model.name,
        platform=f"infer_{model.backend}",
        backend="infer",
        max_batch_size=engine.collator.max_batch if along_first else 0,
        input=ins,
        output=outs,
        parameters={"task": ConfigParameter(model.task)},
        dynamic_batching=DynamicBatching(context.service.limits.max_delay_us) if batched else None,
    )


async def stats(context: RequestContext) -> Statistics:
    return Statistics([_stats(find_engine(context))])


async def all_stats(context: RequestContext) -> Statistics:
    return Statistics([_stats(engine) for engine in context.service.engines.values()])


def _stats(engine: TensorEngine) -> ModelStats:
    model = engine.info
    return ModelStats(name=model.name, version=model.version, **stats_dict(engine.metrics))
