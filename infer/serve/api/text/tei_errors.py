"""Errors as TEI (Hugging Face's text-embeddings-inference) has them."""

from __future__ import annotations

import msgspec

from ....errors import InferError, OverloadedError
from ...http.routing import ErrorFormat, error_text


class TeiError(msgspec.Struct):
    """An error as TEI has it; `error_type`: Validation, Overloaded, Unhealthy or Backend."""

    error: str
    error_type: str


def _tei_status(error: InferError) -> int:
    return 429 if isinstance(error, OverloadedError) else error.status


def _tei_body(error: InferError) -> TeiError:
    status = _tei_status(error)
    kind = {429: "Overloaded", 503: "Unhealthy"}.get(status, "Validation" if status < 500 else "Backend")
    return TeiError(error_text(error), kind)


TEI_ERRORS = ErrorFormat("tei", _tei_status, _tei_body, TeiError)
