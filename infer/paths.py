"""Per-user folders of `infer`: compile caches and the signing key, created with mode 0700 on first use.

`INFER_CACHE` and `INFER_CONFIG` override the places; otherwise the XDG base directories are followed. Files that a run
must not leave, whatever ends it, are known here too.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import NotUsableError, UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a user's share of it, the largest file allowed
_unfinished: set[Path] = set()  # removed by `remove_unfinished` where a signal came between two lines


class OwnedFolder:
    """A temporary folder that is removed when nobody holds this object any more."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert the errors of a path that the user chose for output to `UsageError`; a full disk stays an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UsageError(
            f"the output can't be written: {error.strerror}", where=str(path), hint="Choose another path"
        ) from error
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise UsageError(
            f"the output can't be written, no file can have this name: {error}",
            where=repr(str(path)),
            hint="Choose another path",
        ) from error


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Remove the file or folder `path` at the end of the block, and in `remove_unfinished` if that never came."""
    _unfinished.add(path)
    try:
        yield path
    finally:
        _remove(path)


@contextmanager
def temporary_files() -> Iterator[None]:
    """Put all temporary files of this process into one folder, and remove it at the end."""
    before = tempfile.tempdir
    name = f"infer-{os.getpid()}-{time.monotonic_ns():x}"
    with unfinished(Path(tempfile.gettempdir()) / name) as folder:
        folder.mkdir(mode=0o700)
        tempfile.tempdir = str(folder)
        try:
            yield
        finally:
            tempfile.tempdir = before


def remove_unfinished() -> None:
    """Remove what blocks of `unfinished` left behind, for the end of a process that a signal asked for."""
    for path in list(_unfinished):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    _unfinished.discard(path)


def require_writable() -> None:
    """Raise `NotUsableError` unless the folders of caches and of the key can be written, before hours are spent."""
    for folder in (cache("failures"), _config()):
        with _of_this_user(folder), tempfile.TemporaryFile(dir=folder):
            pass
    signing_key()


def cache(name: str) -> Path:
    """Return the folder `name` below the cache directory, created when missing."""
    base = (
        os.environ.get("INFER_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer"
    )
    return _private(Path(base) / name)


def signing_key() -> bytes:
    """Return this user's signing key, 32 random bytes in a file of mode 0600, created on first use."""
    path = _config() / "key"
    with _of_this_user(path):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return path.read_bytes()
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))
        return path.read_bytes()


def _config() -> Path:
    return _private(
        Path(
            os.environ.get("INFER_CONFIG")
            or Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "infer"
        )
    )


def _private(folder: Path) -> Path:
    with _of_this_user(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@contextmanager
def _of_this_user(path: Path) -> Iterator[None]:
    """Convert the errors of a per-user folder to `NotUsableError`; a full disk stays an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise
        raise NotUsableError(
            f"the user's folder can't be written: {error.strerror}",
            where=str(path),
            hint="Set INFER_CACHE (compiled files) and INFER_CONFIG (the signing key) to folders that can be written",
        ) from error
