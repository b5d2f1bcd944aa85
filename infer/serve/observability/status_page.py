"""Data of the status page: the served models, and a snapshot of current activity."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from ...artifact.model_info import GOLDEN_INPUTS
from ...spec import TensorSpec
from ..api.kserve.kserve_tensors import datatype
from ..batching.tensor_engine import TensorEngine
from ..llm.llm_engine import LLMEngine
from ..served_model import ServedModel
from ..service import Service

REPORTED = (
    *("headline", "passed", "failure", "verdict", "backend", "device", "precision", "baseline", "decodes"),
    *("fidelity", "latency", "size", "original_size", "memory", "made_with", "machine", "command"),
)


class Tensor(msgspec.Struct):
    """Name, datatype and shape of an input or output; a dynamic size is given by its name."""

    name: str
    datatype: str
    shape: list[int | str]


class ModelOverview(msgspec.Struct):
    """A model on the status page.

    `kind`: its interface; `sizes`: least and most of every dynamic size; `context`: tokens of prompt and completion;
    `files`: those that it reads, if its artifact holds the preprocessing; `report`: the parts of report.json that were
    measured when the artifact was made.
    """

    name: str
    version: str
    kind: Literal["tensors", "text", "chat"]
    task: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    sizes: dict[str, tuple[int, int]]
    max_batch: int
    tokenizes: bool
    example: bool
    context: int | None
    files: Literal["image", "sound"] | None
    report: dict[str, Any]


class Overview(msgspec.Struct):
    version: str
    state: str
    models: list[ModelOverview]


class ModelStatus(msgspec.Struct):
    """Snapshot of one model.

    `running`: rows of the batch, or requests between first and last token. The rest are counts since the
    start: `requests` by status, `rejected` by reason, `cancelled` by stage, `batches` by rows, times by
    bucket of a `LogHistogram`.
    """

    running: int
    waiting: int
    requests: dict[str, int]
    rejected: dict[str, int]
    cancelled: dict[str, int]
    late: int
    request_times: dict[int, int]
    rows: int = 0
    batches: dict[int, int] = {}
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    first_token_times: dict[int, int] = {}
    inter_token_times: dict[int, int] = {}
    kv_pages: tuple[int, int] | None = None
    prefix: tuple[int, int] | None = None


class ServerStatus(msgspec.Struct):
    """Snapshot of the server.

    `instance`: which server, where a balancer has several behind one address; `time`: seconds of a monotonic
    clock; `memory`: bytes resident in the server's processes.
    """

    instance: str
    time: float
    state: str
    active: int
    memory: int
    models: dict[str, ModelStatus]


def overview(service: Service) -> Overview:
    return Overview(service.version, service.state, [_served(m) for m in service.models.values()])


def _served(model: TensorEngine | LLMEngine) -> ModelOverview:
    info = model.info
    text = isinstance(model, LLMEngine)
    kind: Literal["tensors", "text", "chat"] = "tensors"
    if isinstance(model, LLMEngine):
        kind = "chat" if model.template is not None else "text"
    return ModelOverview(
        name=info.name,
        version=info.version,
        kind=kind,
        task=info.task,
        inputs=[] if text else [_tensor(spec) for spec in info.inputs],
        outputs=[] if text else [_tensor(spec) for spec in info.outputs],
        sizes={} if text else dict(info.sizes),
        max_batch=1 if isinstance(model, LLMEngine) else model.collator.max_batch,
        tokenizes=isinstance(model, TensorEngine) and model.takes_text,
        example=info.file(GOLDEN_INPUTS) is not None and not text,
        context=model.context if isinstance(model, LLMEngine) else None,
        files=_files(model),
        report=_reported(model.model),
    )


def _files(model: TensorEngine | LLMEngine) -> Literal["image", "sound"] | None:
    media = model.media
    if media is None or media.steps is None:
        return None
    return "sound" if media.reads_sound else "image"


def _tensor(spec: TensorSpec) -> Tensor:
    return Tensor(spec.name, datatype(spec), list(spec.shape))


def _reported(model: ServedModel) -> dict[str, Any]:
    """Return the displayed parts of the report; empty for a model without an artifact."""
    report = model.report()
    return {name: report[name] for name in REPORTED if name in report}


def server_status(service: Service) -> ServerStatus:
    return ServerStatus(
        instance=service.instance,
        time=time.monotonic(),
        state=service.state,
        active=service.active,
        memory=service.memory.resident_bytes(),
        models={name: _model_status(service, name, model) for name, model in service.models.items()},
    )


def _model_status(service: Service, name: str, model: TensorEngine | LLMEngine) -> ModelStatus:
    metrics = service.metrics
    times = metrics.times.get(name)
    found = ModelStatus(
        running=model.running,
        waiting=model.waiting,
        requests=metrics.values_by_label(metrics.requests, name, "code"),
        rejected=metrics.values_by_label(metrics.rejected, name, "reason"),
        cancelled=metrics.values_by_label(metrics.cancelled, name, "stage"),
        late=metrics.values_by_label(metrics.deadline_exceeded, name).get("", 0),
        request_times=times.counts if times else {},
        prompt_tokens=metrics.values_by_label(metrics.prompt_tokens, name).get("", 0),
    )
    if isinstance(model, TensorEngine):
        found.rows = model.metrics.inferences
        found.batches = {rows: batch.compute_infer.count for rows, batch in model.metrics.batches.items()}
        return found
    stats, own = service.collector.stats[name, model.info.version](), model.metrics
    found.tokens, found.steps = own.generation_tokens, stats.steps
    found.first_token_times, found.inter_token_times = (
        own.first_token_times.counts,
        own.inter_token_times.counts,
    )
    found.kv_pages = stats.pages_used, stats.pages_total
    found.prefix = stats.prefix_queries, stats.prefix_hits
    return found
