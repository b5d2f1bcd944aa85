"""Error texts for responses and logs, sanitized: bounded, one line, no invisible characters."""

from __future__ import annotations

import traceback
from pathlib import Path

from ...errors import InferError
from ...sanitize import MAX_ERROR, plain

__all__ = ["MAX_ERROR", "error_text", "exception_summary", "plain"]
MAX_MESSAGE = 256  # characters of one exception's message in a log


def error_text(error: InferError) -> str:
    """Return the text of an error for a response."""
    return plain(str(error))


def exception_summary(error: BaseException) -> str:
    """Return one line for a log: the chain of exceptions, root cause last, each with its innermost frames."""
    parts, seen = [], set[int]()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        frames = traceback.extract_tb(chain.__traceback__)[-6:]
        places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
        parts.append(f"{type(chain).__name__}: {plain(str(chain), MAX_MESSAGE)} [{places}]")
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return " <- ".join(parts)
