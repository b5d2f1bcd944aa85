"""Texts that others had a hand in, fit for an answer or a log: bounded, in one line, nothing invisible."""

from __future__ import annotations

import traceback
from pathlib import Path

from ...errors import InferError
from ...sanitize import MAX_ERROR, plain

__all__ = ["MAX_ERROR", "error_text", "exception_summary", "plain"]
MAX_SAID = 256  # characters of what one exception in a log says


def error_text(error: InferError) -> str:
    """What an answer says of it."""
    return plain(str(error))


def exception_summary(error: BaseException) -> str:
    """One line: the exceptions of a chain, the first cause last, each with the place in our code it came from."""
    said, seen = [], set[int]()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        frames = traceback.extract_tb(chain.__traceback__)[-6:]
        places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
        said.append(f"{type(chain).__name__}: {plain(str(chain), MAX_SAID)} [{places}]")
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return " <- ".join(said)
