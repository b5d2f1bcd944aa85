"""Opening of regular files only: a named pipe, device or socket at an untrusted path is refused.

Opening a pipe waits for a writer and reading a device never ends, so the kind of a file is checked on the open
descriptor, which was opened without waiting.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from .errors import InferError, SourceError
from .sanitize import shortened

MAX_JSON = 1 << 28  # bytes of a configuration file
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link"),
)


def kind_of(mode: int) -> str:
    """Name the kind of a file that is not regular, from its `st_mode`."""
    return next((name for matches, name in KINDS if matches(mode)), "no regular file")


def is_there(path: Path, *, error: type[InferError] = SourceError) -> bool:
    """Return whether anything lies at a path; raise `error` for one that no file can have or that can't be read."""
    try:
        os.fsencode(path)
        return path.exists()
    except (OSError, ValueError) as reason:  # a name too long; a NUL or a lone surrogate in it
        reason_text = getattr(reason, "strerror", None) or str(reason).partition(":")[0]
        raise error(
            f"no file can be opened there: {reason_text}", where=repr(shortened(str(path), 200))
        ) from reason


def is_path(text: str | Path) -> bool:
    """Return whether a text that may also be no path is that of something; False for one that no file can have."""
    try:
        return is_there(Path(text))
    except SourceError:
        return False


def open_regular(path: Path, *, follow_links: bool = True, error: type[InferError] = SourceError) -> BinaryIO:
    """Open a regular file for reading; raise `error` for anything else, and for what can't be opened."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as reason:
        raise error(_why(reason, path), where=str(path)) from reason
    except ValueError as reason:  # a NUL in the name
        raise error(f"no file can have this name: {reason}", where=repr(path)) from reason
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise error(f"expected a regular file, got {kind_of(mode)}", where=str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(
    path: Path, most: int, *, follow_links: bool = True, error: type[InferError] = SourceError
) -> bytes:
    """Read a whole regular file of at most `most` bytes."""
    with open_regular(path, follow_links=follow_links, error=error) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise error(f"expected at most {most} bytes, got a file of {size}", where=str(path))
        try:
            return file.read(most)
        except OSError as reason:
            raise error(_why(reason, path), where=str(path)) from reason


def read_json(path: Path, *, absent_ok: bool = False) -> dict[str, Any]:
    """Read a JSON object, {} where there is no file and `absent_ok`; raise `SourceError` for anything else."""
    if absent_ok and not path.is_file():
        return {}
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise SourceError(f"expected a JSON object, got {type(content).__name__}", where=str(path))
    return content


def read_json_value(path: Path) -> Any:
    """Read a JSON document of any kind; raise `SourceError` for anything else."""
    try:
        return json.loads(read_regular(path, MAX_JSON))
    except (ValueError, RecursionError) as reason:
        raise SourceError(f"expected JSON: {reason}", where=str(path)) from reason


def require_regular(path: Path, *, error: type[InferError] = SourceError) -> None:
    """Raise `error` unless a regular file can be opened at `path`, for libraries that open it by name."""
    open_regular(path, error=error).close()


def _why(reason: OSError, path: Path) -> str:
    if reason.errno == errno.ELOOP:
        return "expected a regular file, got a link"
    if reason.errno == errno.ENXIO:  # a socket, or a pipe or device without another side
        try:
            return f"expected a regular file, got {kind_of(os.lstat(path).st_mode)}"
        except OSError:
            return "expected a regular file"
    return f"the file can't be opened: {reason.strerror or reason}"
