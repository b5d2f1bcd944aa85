"""OpenAI's error format."""

from __future__ import annotations

import msgspec

from ....errors import InferError
from ....sanitize import sanitize_text
from ...http.routing import ErrorFormat, error_text


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(msgspec.Struct):
    error: ErrorBody


def _body(error: InferError, status: int) -> OpenAIError:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    param = (
        sanitize_text(error.where.removeprefix("$."), 128) if error.where and status in (400, 422) else None
    )
    return OpenAIError(ErrorBody(error_text(error), kind, param, error.code))


ERROR_FORMAT = ErrorFormat("openai", _body, OpenAIError, overloaded=429)
