"""OpenAI's /v1: the served models, and embeddings of those that make them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ...errors import InferError, InputError, NotFoundError, OverloadedError, UnsupportedMediaError
from .. import texts
from ..engine import Engine
from ..routing import Call, Dialect, Route
from ..service import Service
from ..tensors import to_json

Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(msgspec.Struct):
    error: ErrorBody


class Model(msgspec.Struct):
    id: str
    task: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "infer"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """Unknown fields are accepted and ignored. `input`: a text, texts, token ids, or lists of token ids."""

    model: str
    input: str | list[str | int | Ids]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    user: str | None = None


class Embedding(msgspec.Struct):
    """`embedding`: numbers, or base64 of little-endian float32. Values that are not finite are strings."""

    index: int
    embedding: list[float | str] | str
    object: Literal["embedding"] = "embedding"


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


def _status(error: InferError) -> int:
    return 429 if isinstance(error, OverloadedError) else error.status


def _body(error: InferError) -> OpenAIError:
    status = _status(error)
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    param = error.where.removeprefix("$.") if isinstance(error, InputError) and error.where else None
    return OpenAIError(ErrorBody(str(error), kind, param, error.code))


DIALECT = Dialect("openai", _status, _body, OpenAIError)


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


def routes(service: Service) -> list[Route]:
    return [
        Route("GET", "/v1/models", None, ModelList, models, "The served models", DIALECT),
        Route("GET", "/v1/models/{model}", None, Model, model, "One served model", DIALECT, (404,)),
        Route(
            "POST",
            "/v1/embeddings",
            EmbeddingsRequest,
            Embeddings,
            embeddings,
            "Embeddings of texts",
            DIALECT,
            (429,),
            work=True,
        ),
    ]


async def models(call: Call) -> ModelList:
    return ModelList([Model(name, engine.predictor.task) for name, engine in call.service.engines.items()])


async def model(call: Call) -> Model:
    return Model(call.path["model"], _engine(call, call.path["model"]).predictor.task)


async def embeddings(call: Call) -> Embeddings:
    media = call.headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if media != b"application/json":
        raise UnsupportedMediaError("the body must be JSON", hint="Send Content-Type: application/json")
    request = call.json(EmbeddingsRequest)
    engine = _engine(call, request.model)
    call.model = request.model
    if engine.predictor.task != "embedding":
        raise InputError(
            f"{request.model} is a {engine.predictor.task} model and makes no embeddings", where="model"
        )
    spec = engine.predictor.outputs[0]
    width = spec.shape[-1]
    if request.dimensions not in (None, width):
        raise InputError(f"{request.model} makes embeddings of {width} dimensions only", where="dimensions")
    arrays = await _tokens(call, engine, request.input)
    answer = await texts.infer_rows(engine, arrays, timeout=call.timeout())
    vectors = answer.outputs[spec.name].astype(np.float32, copy=False)
    engine.metrics.prompt_tokens.inc(used := texts.count(arrays))
    encode = _base64 if request.encoding_format == "base64" else _numbers(engine)
    data = [Embedding(index, encode(vector)) for index, vector in enumerate(vectors)]
    return Embeddings(data, request.model, Usage(used, used))


def _engine(call: Call, name: str) -> Engine:
    try:
        return call.service.engine(name)
    except NotFoundError as error:
        raise ModelNotFoundError(error.message, hint=error.hint) from error


async def _tokens(call: Call, engine: Engine, given: str | list[Any]) -> dict[str, np.ndarray]:
    rows: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not rows:
        raise InputError("expected at least one text", where="input")
    for kind in (str, list):
        if all(isinstance(row, kind) for row in rows):
            break
    else:
        raise InputError("expected a text, texts, token ids, or lists of token ids", where="input")
    if isinstance(rows[0], list):
        if any(not isinstance(token, int) for row in rows for token in row):
            raise InputError("expected token ids", where="input")
        return texts.from_ids(engine, rows, "input")
    if "" in rows:
        raise InputError("an empty text has no embedding", where=f"input[{rows.index('')}]")
    return await texts.tokenize(call.service, engine, rows)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


def _numbers(engine: Engine) -> Callable[[np.ndarray], list[float | str]]:
    def encode(vector: np.ndarray) -> list[float | str]:
        values, wrong = to_json(vector)
        engine.metrics.nonfinite.inc(wrong)
        return values

    return encode
