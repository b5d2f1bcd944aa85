"""Libraries: their exceptions as `infer` errors (out of memory, full disk, unsupported model), their logs silenced."""

from __future__ import annotations

import contextlib
import dis
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from . import paths
from .errors import InferError, NotUsableError, ResourceError, SourceError
from .sanitize import shortened

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 20  # logs of failures
_DOING = {"lower": "lower", "compare": "run", "time": "run"}
MOST_CAUSES = 16
MOST_SAID = 300  # characters of a library's message
MOST_INPUTS = 4  # of a model, named in a message
# What the system says of a full disk, and what libraries in C++ and Rust, which have no class for it, of a write that
# ended early.
_FULL = re.compile(
    r"no space left on device|os error (?:28|27|122)\b|disk quota exceeded|file too large", re.IGNORECASE
)
_ENDED_EARLY = re.compile(
    r"no space left|disk quota|disk full|failed (?:to write|writing)"
    r"|(?:could not|can ?not|can't|unable to) write|error writing|write (?:failed|error)",
    re.IGNORECASE,
)
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
    torch = sys.modules.get("torch")  # without which nothing of it was raised
    full = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    if isinstance(error, full) or (
        isinstance(error, RuntimeError) and any(words in text for words in _ALLOCATORS)
    ):
        return ResourceError("out of memory", hint="Try --load offload, or a machine with more")
    if any(map(_means_full, islice(_causes(error), MOST_CAUSES))):
        message = shortened(" ".join(str(error).split()), MOST_SAID)
        return ResourceError(
            f"no space left on the disk: {message}",
            hint="Free some, or set INFER_CACHE and TMPDIR to a disk with more. Nothing was kept",
        )
    return None


def _means_full(error: BaseException) -> bool:
    """Return true for an exception that says that a file could not be written to its end.

    Of the words of a model's own errors none count: those of an error that infer made of another one, those of a
    Python class that no library in C++ or Rust uses, and those of a `raise` that name no error of the system.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in paths.FULL
    if isinstance(error, InferError):
        return error.__cause__ is None and any(words.search(str(error)) for words in (_FULL, _ENDED_EARLY))
    if type(error).__module__ == "builtins" and type(error) not in (RuntimeError, OSError, Exception):
        return False
    if _FULL.search(str(error)) is not None:
        return True
    return _ENDED_EARLY.search(str(error)) is not None and not _is_raised_in_python(error)


def _is_raised_in_python(error: BaseException) -> bool:
    """Return true for an exception of a `raise` statement, false for one out of a call of a library in C++ or Rust."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def float_model_errors(inputs: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Convert any exception of the float model on its inputs to `SourceError`, not a failure of a backend.

    `inputs`: named in the message, where they are at hand.
    """
    try:
        yield
    except InferError:
        raise
    except Exception as error:
        if refusal := as_resource_error(error):
            raise refusal from error
        listed = ", ".join(
            f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            for name, value in list((inputs or {}).items())[:MOST_INPUTS]
        )
        raise SourceError(
            f"the float model itself fails on its inputs{listed and f' ({listed})'}: {describe(error)}",
            hint="Give inputs that the model can run, with --data",
        ) from error


def as_backend_error(name: str, stage: str, error: Exception, others: list[str]) -> InferError:
    """Convert an exception from a backend's `lower`, `open` or `run` to an `InferError`.

    The message names the exception; the traceback is written to a file that the hint names.
    """
    if isinstance(error, ResourceError):
        return error
    if refusal := as_resource_error(error):
        return refusal
    if isinstance(error, InferError):
        return error
    doing = _DOING.get(stage, "lower")
    hint = f"The traceback is in {log(name, error)}"
    if others:
        hint = f"Try --backend {others[0]}. {hint}"
    return NotUsableError(f"{name} could not {doing} this model: {describe(error)}", hint=hint)


def describe(error: BaseException) -> str:
    """Format an exception as its type and the first line of its message."""
    sentence = first_sentence(error)
    return f"{type(error).__name__}: {sentence}" if sentence != type(error).__name__ else sentence


def first_sentence(error: BaseException) -> str:
    """Return the first line of an exception's message, with the next where it ends at a colon; its type without one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sentence = ""
    while lines and (not sentence or sentence.endswith(":")):
        sentence = f"{sentence} {lines.pop(0)}".strip()
    return shortened(sentence.rstrip(": ").removesuffix("."), MOST_SAID) or type(error).__name__


def log(name: str, error: BaseException) -> Path:
    """Write the traceback to a new file in the cache folder, which keeps the last `KEPT`."""
    folder = paths.cache("failures")
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
        file.writelines(traceback.format_exception(error))
    for old in sorted(folder.glob("*.log"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    return Path(path)


@contextlib.contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Suppress warnings and log records below `level` of exporters, compilers and bitsandbytes; exceptions pass."""
    names = ("torch", "torch.export", "torch._inductor", "torch.onnx", "bitsandbytes")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(level)
        try:
            yield
        finally:
            for logger, usual in zip(loggers, levels, strict=True):
                logger.setLevel(usual)
