"""Translation of library exceptions into `infer` errors: out of memory, full disk, unsupported model."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from . import paths
from .errors import InferError, NotUsableError, ResourceError, SourceError

KEPT = 20  # logs of failures
_DOING = {"lower": "lower", "compare": "run", "time": "run"}
_ALLOCATORS = (
    "defaultcpuallocator",
    "can't allocate memory",
    "cuda out of memory",
    "failed to allocate memory",
    "bad_alloc",
)


def as_resource_error(error: BaseException) -> ResourceError | None:
    """Return the `ResourceError` for an exception that means memory or disk ran out, else None."""
    text = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in _ALLOCATORS)
    ):
        return ResourceError("out of memory", hint="Try --load offload, or a machine with more")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left on the disk: {error}", hint="Free some, or set INFER_CACHE")
    return None


@contextlib.contextmanager
def float_model_errors() -> Iterator[None]:
    """Convert any exception of the float model on its inputs to `SourceError`, not a failure of a backend."""
    try:
        yield
    except InferError:
        raise
    except Exception as error:
        if refusal := as_resource_error(error):
            raise refusal from error
        raise SourceError(
            f"the float model itself fails on its inputs: {describe(error)}",
            hint="Give inputs that the model can run, with --data",
        ) from error


def as_backend_error(name: str, stage: str, error: Exception, others: list[str]) -> InferError:
    """Convert an exception from a backend's `lower`, `open` or `run` to an `InferError`.

    The message names the exception; the traceback is written to a file that the hint names.
    """
    if isinstance(error, InferError):
        return error
    if refusal := as_resource_error(error):
        return refusal
    doing = _DOING.get(stage, "lower")
    hint = f"The traceback is in {log(name, error)}"
    if others:
        hint = f"Try --backend {others[0]}. {hint}"
    return NotUsableError(f"{name} could not {doing} this model: {describe(error)}", hint=hint)


def describe(error: BaseException) -> str:
    """Format an exception as its type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def log(name: str, error: BaseException) -> Path:
    """Write the traceback to a new file in the cache folder, which keeps the last `KEPT`."""
    folder = paths.cache("failures")
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
        file.writelines(traceback.format_exception(error))
    for old in sorted(folder.glob("*.log"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    return Path(path)
