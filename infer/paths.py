"""Per-user folders of `infer`: compile caches and the signing key, created with mode 0700 on first use.

`INFER_CACHE` and `INFER_CONFIG` override the places; otherwise the XDG base directories are followed.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert the errors of a path that the user chose for output to `UsageError`; a full disk stays an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            f"the output can't be written: {error.strerror}", where=str(path), hint="Choose another path"
        ) from error


def cache(name: str) -> Path:
    """Return the folder `name` below the cache directory, created when missing."""
    base = (
        os.environ.get("INFER_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer"
    )
    return _private(Path(base) / name)


def signing_key() -> bytes:
    """Return this user's signing key, 32 random bytes in a file of mode 0600, created on first use."""
    base = (
        os.environ.get("INFER_CONFIG")
        or Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "infer"
    )
    path = _private(Path(base)) / "key"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(32))
    return path.read_bytes()


def _private(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
