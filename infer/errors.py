"""Exception hierarchy of `infer`, with exit codes (command line) and status codes (HTTP).

InferError                    1  500   a bug of ours, or the base class
├── UsageError                2  400   an option or a name is wrong
│   └── InputError            2  400   a tensor does not match its spec
│       └── GrammarError      2  422   a grammar that can't be enforced
├── SourceError               3  400   the file is not what it should be
│   ├── UnsafeSourceError     3  400   the file holds code, and --trust-code was not given
│   └── ArtifactError         3  500   the artifact is damaged, foreign or wrong
├── GateError                 4  500   less faithful, or slower, than was allowed
├── NotUsableError            5  501   this machine, or this model, can't do it
├── BusyError                 6  409   another process writes there, or it exists
├── ResourceError             7  503   out of memory or disk
└── ServeError                1  500   only over HTTP
    ├── NotFoundError         1  404
    ├── TooLargeError         1  413
    ├── UnsupportedMediaError 1  415
    ├── OverloadedError       1  503   queue full; carries `retry_after` seconds
    ├── DeadlineError         1  504
    ├── NotReadyError         1  503
    ├── WorkerDiedError       1  500   the model's process ended while it worked on it
    └── PoisonError           1  500   the model's process ended twice while it worked on it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InferError(Exception):
    """Base class of all errors of `infer`.

    `message` says what was expected and what came, `where` in which file, tensor or field, `hint` what to do.
    `exit_code`: of the command line; `status` and `code`: over HTTP (see docs/errors.md).
    """

    exit_code = 1
    status = 500
    code = "internal"

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message, self.where, self.hint = message, where, hint

    def __str__(self) -> str:
        text = f"{self.message} - at {self.where}" if self.where else self.message
        return f"{text}. {self.hint}" if self.hint else text


class UsageError(InferError):
    """Invalid option, argument or name given by the user."""

    exit_code, status, code = 2, 400, "usage"


class InputError(UsageError):
    """A tensor or request field that does not match its spec."""

    code = "invalid_input"


class GrammarError(InputError):
    """A well-formed grammar that can't be compiled, or that became too complex while it was applied."""

    status, code = 422, "invalid_schema"


class SourceError(InferError):
    """A file that can't be read as what it should be."""

    exit_code, status, code = 3, 400, "bad_file"


class UnsafeSourceError(SourceError):
    """A file that holds code, opened without `--trust-code`."""

    code = "unsafe_code"


class ArtifactError(SourceError):
    """A damaged, foreign or inconsistent artifact."""

    status, code = 500, "bad_artifact"


class GateError(InferError):
    """A result that failed the fidelity, speed or coverage gate; nothing is published."""

    exit_code, code = 4, "gate"


class NotUsableError(InferError):
    """A backend, format or feature that this machine or this model can't use."""

    exit_code, status, code = 5, 501, "not_usable"


class BusyError(InferError):
    """A target that exists, or that another process is writing."""

    exit_code, status, code = 6, 409, "busy"


class ResourceError(InferError):
    """Out of memory or disk space."""

    exit_code, status, code = 7, 503, "out_of_resources"


class ServeError(InferError):
    """Base class of errors that only occur over HTTP."""

    pass


class NotFoundError(ServeError):
    """An unknown model, version or route."""

    status, code = 404, "not_found"


class TooLargeError(ServeError):
    """A request body or batch above the limit."""

    status, code = 413, "too_large"


class UnsupportedMediaError(ServeError):
    """A content type or encoding that the route does not accept."""

    status, code = 415, "unsupported_media"


class OverloadedError(ServeError):
    """A request refused by admission control; `retry_after` is in seconds."""

    status, code = 503, "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0, where: str = "", hint: str = "") -> None:
        super().__init__(message, where=where, hint=hint)
        self.retry_after = retry_after


class DeadlineError(ServeError):
    """A request that missed its deadline."""

    status, code = 504, "deadline_exceeded"


class NotReadyError(ServeError):
    """A model that is not loaded yet, or a server that is shutting down."""

    status, code = 503, "not_ready"


class WorkerDiedError(ServeError):
    """The worker process ended while it ran the request."""

    code = "worker_died"


class PoisonError(ServeError):
    """The worker process ended twice while it ran the request, which is now quarantined."""

    code = "poison_request"


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Build the `UsageError` of an unknown name, with the known ones and the nearest."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    return UsageError(f"no {kind} named {name!r}", hint=f"Known: {', '.join(names)}.{guess}")
