"""OpenAI's /v1/embeddings: vectors of texts, of token ids, or of each token of a text."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import msgspec
import numpy as np

from ....errors import InputError
from ....tasks import late_interaction, text_model
from ...batching import text_inputs
from ...batching.tensor_engine import TensorEngine
from ...http.json_parse import require_json
from ...http.request_context import RequestContext
from ...model_lookup import find_model
from ...task_call import TaskCall
from ..kserve.kserve_tensors import to_json
from .openai_request import texts_or_ids

TASKS = ("embedding", late_interaction.TASK)
Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/embeddings; `input`: a text, texts, token ids, or lists of token ids.

    `prompt_name`: a prompt of the model, such as "query", put before each text (token ids get none); `input_type`: of a
    late-interaction model, "query" or "document" (default), or as Cohere names them, "search_query" and
    "search_document". Unknown fields are accepted and ignored.
    """

    model: str
    input: str | list[str | int | Ids]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    user: str | None = None
    prompt_name: str | None = None
    input_type: str | None = None


class Embedding(msgspec.Struct):
    """One embedding: numbers, or base64 of little-endian float32; non-finite values are strings."""

    index: int
    embedding: list[float | str] | str
    object: Literal["embedding"] = "embedding"


class TokenEmbeddings(msgspec.Struct):
    """Vectors of the tokens of a text, as Jina's multi-vector route names them; each as in `Embedding`."""

    index: int
    embeddings: list[list[float | str] | str]
    object: Literal["embeddings"] = "embeddings"


class EmbeddingsUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class MultiVectorEmbeddings(msgspec.Struct):
    data: list[TokenEmbeddings]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


async def embeddings(context: RequestContext) -> Embeddings | MultiVectorEmbeddings:
    require_json(context.headers)
    request = context.json(EmbeddingsRequest)
    engine = find_model(context, request.model)
    if not isinstance(engine, TensorEngine) or engine.info.task not in TASKS:
        raise InputError(
            f"{request.model} is a {engine.info.task} model and makes no embeddings", where="model"
        )
    tokenwise = engine.info.task == late_interaction.TASK
    call = TaskCall(context, engine, strict=tokenwise)
    call.check_admission()
    if request.dimensions not in (None, call.model.width):
        raise InputError(
            f"{request.model} makes embeddings of {call.model.width} dimensions only", where="dimensions"
        )
    encode = _base64 if request.encoding_format == "base64" else _numbers
    if tokenwise:
        found = await _token_vectors(call, request)
        parts = [TokenEmbeddings(index, [encode(one) for one in rows]) for index, rows in enumerate(found)]
        return MultiVectorEmbeddings(parts, request.model, EmbeddingsUsage(call.tokens, call.tokens))
    vectors = await _vectors(call, request)
    data = [Embedding(index, encode(vector)) for index, vector in enumerate(vectors)]
    return Embeddings(data, request.model, EmbeddingsUsage(call.tokens, call.tokens))


async def _vectors(call: TaskCall, request: EmbeddingsRequest) -> np.ndarray:
    rows = texts_or_ids(request.input, "input")
    if not rows:
        raise InputError("expected at least one text", where="input")
    if isinstance(rows[0], list):
        arrays = text_inputs.from_ids(call.engine, rows, "input")
        return np.asarray((await call.run_arrays(arrays, [call.model.output]))[call.model.output])
    if "" in rows:
        raise InputError("an empty text has no embedding", where=f"input[{rows.index('')}]")
    return await call.perform(
        text_model.run_texts(call.model, rows, "input", prompt_name=request.prompt_name)
    )


async def _token_vectors(call: TaskCall, request: EmbeddingsRequest) -> list[np.ndarray]:
    """Return a list of vectors for each text, as Jina's multi-vector route names it."""
    given = [request.input] if isinstance(request.input, str) else request.input
    role = late_interaction.role_of(request.input_type or request.prompt_name, "input_type")
    texts = [text for text in given if isinstance(text, str)]
    if not texts or len(texts) < len(given):
        raise InputError("expected a text or texts: this model compares tokens by their role", where="input")
    call.check_texts(texts, "input")
    return await call.perform(text_model.embed_tokens(call.model, texts, [role] * len(texts), "input"))


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


def _numbers(vector: np.ndarray) -> list[float | str]:
    return to_json(vector)
