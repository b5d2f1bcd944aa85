"""OpenAI's error format, and look-up of the requested model, for all /v1 routes."""

from __future__ import annotations

from typing import Any

import msgspec

from ....errors import (
    InferError,
    InputError,
    NotFoundError,
    OverloadedError,
    UnsupportedMediaError,
)
from ....sanitize import sanitize_text
from ...http.request_context import RequestContext
from ...http.routing import ErrorFormat, error_text
from ...llm.llm_engine import LLMEngine


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(msgspec.Struct):
    error: ErrorBody


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


def _status(error: InferError) -> int:
    return 429 if isinstance(error, OverloadedError) else error.status


def _body(error: InferError) -> OpenAIError:
    status = _status(error)
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    param = (
        sanitize_text(error.where.removeprefix("$."), 128) if error.where and status in (400, 422) else None
    )
    return OpenAIError(ErrorBody(error_text(error), kind, param, error.code))


ERROR_FORMAT = ErrorFormat("openai", _status, _body, OpenAIError)


def require_json(context: RequestContext) -> None:
    """Raise `UnsupportedMediaError` for a body whose Content-Type is not JSON."""
    media = context.headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if media != b"application/json":
        raise UnsupportedMediaError("the body must be JSON", hint="Send Content-Type: application/json")


def find_model(context: RequestContext, name: str) -> Any:
    """Return the served model of that name, or the one with an adapter of that name.

    Raises `ModelNotFoundError`.
    """
    model = context.service.models.get(name)
    if model is None and (owner := context.service.adapters.get(name)) is not None:
        context.adapter, name = name, owner
        model = context.service.models.get(owner)
    if model is None:
        served = ", ".join([*context.service.models, *context.service.adapters])
        raise ModelNotFoundError("no such model is served", hint=f"Served: {served}")
    context.model = name
    return model


def find_llm(context: RequestContext, name: str) -> LLMEngine:
    """Return the language model of that name; raise `ModelNotFoundError`, or `InputError` for another kind."""
    model = find_model(context, name)
    if not isinstance(model, LLMEngine):
        task = model.info.task
        raise InputError(f"{name} is a model for {task} and generates no text", where="model")
    return model
