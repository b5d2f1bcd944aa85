"""Messages between the server process and a worker: plain structs, msgpack, no pickle."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from ...artifact.model_info import ModelInfo
from ...llm.engine.requests import Output, Request
from ...llm.engine.stats import EngineStats
from ...process.error_messages import ErrorMessage

TensorLocation = tuple[str, str, tuple[int, ...], int]  # in a buffer: name, numpy dtype, shape, offset


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Location of a model: `opener` (`module:attribute`) makes its `ServedModel` of `path` and `options`.

    `name` and `version` replace those that the artifact gives itself.
    """

    path: str
    name: str | None = None
    version: str | None = None
    opener: str = "infer.serve.served_model:load"
    options: dict[str, Any] = {}

    def named(self, info: ModelInfo) -> ModelInfo:
        """Return the description of the opened model with its name and version here."""
        return replace(info, name=self.name or info.name, version=self.version or info.version)


class LanguageModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a language model that are known once its engine runs; see `ServedLanguageModel`."""

    context: int
    start_tokens: int
    vocab_size: int
    page_bytes: int
    adapter_names: tuple[str, ...]
    tool_form: str
    reasoning_form: str


class LoadModel(msgspec.Struct, tag="open", array_like=True):
    """Server to worker, first message: load the model, warm it up, send `WorkerReady`.

    `again`: a restart of a worker whose speed is known, so that a model that passed its self-test skips the
    timed warm-up.
    """

    source: ModelSource
    again: bool = False


class RunBatch(msgspec.Struct, tag="run", array_like=True):
    """Server to worker: run the inputs in this shared buffer, write outputs from byte `used` on."""

    buffer: int
    used: int
    inputs: list[TensorLocation]


class ShutDown(msgspec.Struct, tag="close", array_like=True):
    """Server to worker: end."""


class WorkerReady(msgspec.Struct, tag="ready", array_like=True):
    """Worker to server: the model is open and warm.

    `phases`: seconds of each part of the start; `speeds`: work of a batch, or tokens of a prompt, and the
    seconds they took; `tested`: the self-test passed, or two tokens were generated.
    """

    info: ModelInfo
    language_model: LanguageModelInfo | None
    phases: dict[str, float]
    speeds: list[tuple[float, float]] = []
    tested: bool = False


class BatchDone(msgspec.Struct, tag="done", array_like=True):
    """Worker to server: a batch ran.

    `began`: start by the system's monotonic clock; `seconds`: compute time of the model alone.
    """

    outputs: list[TensorLocation]
    seconds: float
    began: float


class Heartbeat(msgspec.Struct, tag="beat", array_like=True):
    """Worker to server, about once a second while it loads or is idle and can answer.

    While it loads, `doing` says where it is, and `work` changes as long as it gets anywhere.
    """

    steps: int = 0
    doing: str = ""
    work: float = 0.0


class SubmitRequest(msgspec.Struct, tag="submit", array_like=True):
    """Server to worker: start this request; `EngineOutputs` or `RequestRejected` follow."""

    request: Request


class CancelRequest(msgspec.Struct, tag="cancel", array_like=True):
    """Server to worker: cancel this request."""

    id: str


class CompileGrammar(msgspec.Struct, tag="check", array_like=True):
    """Server to worker: compile this grammar; `GrammarCompiled` with the same number follows.

    `tried`: bytes and seconds that its trial compilation took, 0 without one.
    """

    number: int
    constraint: dict[str, Any]
    tried: tuple[int, float] = (0, 0.0)


class EngineOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """Worker to server: outputs of one engine step."""

    outputs: list[Output]


class RequestRejected(msgspec.Struct, tag="refused", array_like=True):
    """Worker to server: the request was not started, for this reason."""

    id: str
    error: ErrorMessage


class GrammarCompiled(msgspec.Struct, tag="checked", array_like=True):
    """Worker to server: the grammar is compiled and cached, or failed with `error`."""

    number: int
    error: ErrorMessage | None


class EngineStatus(msgspec.Struct, tag="pulse", array_like=True):
    """Worker to server, twice a second: state of a language model's engine.

    `beat`: the system's monotonic clock at the engine's last step; `stats`: its counters; `answering`: its
    idle self-test is not overdue.
    """

    beat: float
    stats: EngineStats
    answering: bool = True


ToWorker = LoadModel | RunBatch | SubmitRequest | CancelRequest | CompileGrammar | ShutDown
FromWorker = (
    WorkerReady
    | BatchDone
    | ErrorMessage
    | Heartbeat
    | EngineOutputs
    | RequestRejected
    | GrammarCompiled
    | EngineStatus
)
