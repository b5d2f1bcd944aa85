"""Exceptions as messages between processes: a plain struct, no pickle."""

from __future__ import annotations

import msgspec

from .. import errors
from ..errors import InferError


class ErrorMessage(msgspec.Struct, tag="failed", array_like=True):
    """Child to parent: an operation raised.

    `kind` is the name of a class of `infer.errors`, or empty.
    """

    kind: str
    text: str
    where: str = ""
    hint: str = ""


class ChildError(Exception):
    """Exception of a child process that is not an `InferError`; its traceback is in the child's log."""


def encode_error(error: BaseException) -> ErrorMessage:
    """Convert an exception to a message."""
    if isinstance(error, InferError):
        kind = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        return ErrorMessage(kind, error.message, error.where, error.hint)
    kind = "MemoryError" if isinstance(error, MemoryError) else ""
    return ErrorMessage(kind, f"{type(error).__name__}: {error}")


def decode_error(message: ErrorMessage) -> Exception:
    """Convert a message back to an exception, of the same class where `infer.errors` has it."""
    if message.kind == "MemoryError":
        return MemoryError(message.text)
    kind = getattr(errors, message.kind, None) if message.kind else None
    if isinstance(kind, type) and issubclass(kind, InferError):
        return kind(message.text, where=message.where, hint=message.hint)
    return ChildError(message.text)
