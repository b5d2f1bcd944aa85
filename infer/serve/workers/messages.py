"""What front and worker say to each other: plain structs, msgpack, no pickle."""

from __future__ import annotations

from typing import Any

import msgspec

from ... import errors
from ...errors import InferError
from ...llm.engine.requests import Output, Request
from ...spec import TensorSpec

Placed = tuple[str, str, tuple[int, ...], int]  # a tensor in a slab: name, numpy dtype, shape, offset


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker serves: `opener` is `module:attribute`, called with `path` and `options`. `name` and `version`
    replace those that the artifact gives itself."""

    path: str
    name: str | None = None
    version: str | None = None
    opener: str = "infer.predict:Predictor.load"
    options: dict[str, Any] = {}


def rename(predictor: Any, source: Source) -> Any:
    """The predictor under the names of `source`."""
    predictor.name = source.name or predictor.name
    predictor.version = source.version or predictor.version
    return predictor


class Manifest(msgspec.Struct, frozen=True):
    """The parts of an artifact's manifest that serving reads."""

    backend: str | None = None
    meta: dict[str, Any] | None = None
    files: dict[str, str] = {}


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is. A worker that is started again must show the same card."""

    name: str
    version: str
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: dict[str, tuple[int, int]]
    max_batch: int
    padding: dict[str, int]
    manifest: Manifest
    path: str | None = None
    context: int = 0  # of a language model: tokens of prompt and answer together
    vocab_size: int = 0
    page_bytes: int = 0  # of its KV cache, all layers together
    adapters: tuple[str, ...] = ()


class Open(msgspec.Struct, tag="open", array_like=True):
    """To the worker, first: load this, run it once, say `Ready`. `again`: its speed is known of an earlier worker, and
    somebody waits, so that a model which gave its golden answers is not run for its speed."""

    source: Source
    again: bool = False


class Run(msgspec.Struct, tag="run", array_like=True):
    """To the worker: inputs lie in this slab, outputs go behind byte `used` of it."""

    slab: int
    used: int
    inputs: list[Placed]


class Close(msgspec.Struct, tag="close", array_like=True):
    """To the worker: end."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """From the worker: the model is open and warm. `phases`: seconds of each part of the start; `speeds`: elements of
    a batch, or tokens of a prompt, and the seconds they took; `tested`: it gave the right answers to its golden inputs,
    or wrote two tokens."""

    card: Card
    phases: dict[str, float]
    speeds: list[tuple[int, float]] = []
    tested: bool = False


class Done(msgspec.Struct, tag="done", array_like=True):
    """From the worker: a batch ran. `began`: by the system's monotonic clock; `seconds`: of the model alone."""

    outputs: list[Placed]
    seconds: float
    began: float


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """From the worker: what was asked raised. `kind`: a class of `infer.errors`, or empty."""

    kind: str
    text: str
    where: str = ""
    hint: str = ""


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """From a worker that loads, or that has nothing to do and can answer, about once a second."""

    steps: int = 0


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """To the worker: begin this request; `Outputs` or `Refused` follow."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """To the worker: nobody wants more of this request."""

    id: str


class Check(msgspec.Struct, tag="check", array_like=True):
    """To the worker: compile this grammar; `Checked` of the same number follows. `tried`: bytes and seconds that it
    took in a trial, 0 where there was none."""

    number: int
    constraint: dict[str, Any]
    tried: tuple[int, float] = (0, 0.0)


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """From the worker: what one step of the engine made."""

    outputs: list[Output]


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """From the worker: the request was not begun, for this reason."""

    id: str
    error: Failed


class Checked(msgspec.Struct, tag="checked", array_like=True):
    """From the worker: the grammar is compiled and cached, or can't be."""

    number: int
    error: Failed | None


class Pulse(msgspec.Struct, tag="pulse", array_like=True):
    """From a worker of a language model, twice a second. `beat`: the system's monotonic clock when the engine last
    turned; `stats`: its counters; `answering`: the question that it asks itself while idle is not overdue."""

    beat: float
    stats: dict[str, float | list[int]]
    answering: bool = True


ToWorker = Open | Run | Submit | Cancel | Check | Close
FromWorker = Ready | Done | Failed | Beat | Outputs | Refused | Checked | Pulse


class ModelError(Exception):
    """The model raised something that is no `InferError`; its traceback stands in the worker's log."""


def failed(error: BaseException) -> Failed:
    """The error as it crosses over."""
    if isinstance(error, InferError):
        return Failed(type(error).__name__, error.message, error.where, error.hint)
    kind = "MemoryError" if isinstance(error, MemoryError) else ""
    return Failed(kind, f"{type(error).__name__}: {error}")


def raised(message: Failed) -> Exception:
    """The error on the other side: of the same class where it is one of `infer.errors`."""
    if message.kind == "MemoryError":
        return MemoryError(message.text)
    kind = getattr(errors, message.kind, None) if message.kind else None
    if isinstance(kind, type) and issubclass(kind, InferError):
        return kind(message.text, where=message.where, hint=message.hint)
    return ModelError(message.text)
