"""Anthropic's error format."""

from __future__ import annotations

from typing import Literal

import msgspec

from ....errors import InferError
from ...http.routing import ErrorFormat, error_text

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """Body of an error, and of the event that ends a stream by one."""

    error: ErrorDetails
    type: Literal["error"] = "error"


def _body(error: InferError, status: int) -> AnthropicError:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicError(ErrorDetails(kind, error_text(error)))


ERROR_FORMAT = ErrorFormat("anthropic", _body, AnthropicError, overloaded=429)
