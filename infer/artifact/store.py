"""Artifact store: written to a staging folder, hashed, signed, renamed into place, never edited.

manifest.json  what it is, how it was made, sha256 of every other file      manifest.sig  HMAC by this user's key
graph.json     inputs, outputs, sizes                                       graph.pt2     the program, without weights
weights/       safetensors, mapped by every backend                         compiled/     what the backend made
golden/        real inputs, the float outputs, the outputs when it was made
report.json    report.html    and the files of the tokenizer
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..errors import BusyError, ResourceError, UnsafeSourceError
from ..paths import unfinished, writing
from .files import check_files
from .manifest import FORMAT, MANIFEST, Manifest, read_manifest
from .signature import SIGNATURE, sign, signed_here

__all__ = ["FORMAT", "MANIFEST", "SIGNATURE", "Manifest", "read_manifest", "signed_here"]


@contextmanager
def stage(output: Path, *, replace: bool) -> Iterator[Path]:
    """Create a private staging folder beside `output`, removed unless `publish` renamed it; a second writer is refused.

    Raises `BusyError` when `output` exists and may not be replaced, or another process is writing it, and `UsageError`
    for a path that can't be written.
    """
    with writing(output):
        os.fsencode(output)  # raises for a lone surrogate, which `exists` calls absent
        output.parent.mkdir(parents=True, exist_ok=True)
        exists = output.exists()
    if exists and not replace:
        raise BusyError(f"{output} exists", hint="Choose another --output, or replace it with --force")
    if exists and not (output / MANIFEST).exists():
        raise BusyError(f"{output} exists and is not an artifact", hint="Choose another --output")
    _remove_stale(output)
    folder = output.with_name(f".{output.name}.tmp-{os.getpid()}-{time.monotonic_ns() & 0xFFFFFF:x}")
    with _lock(output), _full_disk(), unfinished(folder):
        folder.mkdir(mode=0o700)
        yield folder


@contextmanager
def _lock(output: Path) -> Iterator[None]:
    path = output.with_name(f".{output.name}.lock")
    with writing(output):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.read(handle, 32).decode("ascii", "replace") or "unknown"
            raise BusyError(f"{output} is being written by process {pid}", hint="Wait for it") from error
        with unfinished(path):
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            yield
    finally:
        os.close(handle)


def wait_for_writer(output: Path) -> None:
    """Wait while another process writes `output`."""
    try:
        handle = os.open(output.with_name(f".{output.name}.lock"), os.O_RDWR)
    except FileNotFoundError:  # it has just ended
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)


@contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        from ..library_errors import as_resource_error

        refusal = None if isinstance(error, ResourceError) else as_resource_error(error)
        if refusal is None:
            raise
        raise refusal from error


def _remove_stale(output: Path) -> None:
    for folder in output.parent.glob(f".{output.name}.tmp-*"):
        pid = folder.name.rpartition(".tmp-")[2].partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, output: Path, manifest: Manifest) -> Manifest:
    """Hash, sign and rename a staged folder; the previous artifact is removed only afterwards.

    Every user may read it: who serves an artifact need not be who made it.
    """
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors' files are their owner's alone
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(_sha256_synced, paths))
    files = {str(p.relative_to(folder)): digest for p, digest in zip(paths, digests, strict=True)}
    lengths = {str(p.relative_to(folder)): p.stat().st_size for p in paths}
    manifest = msgspec.structs.replace(manifest, files=files, lengths=lengths)
    text = as_text(manifest)
    _write_synced(folder / MANIFEST, text)
    _write_synced(folder / SIGNATURE, sign(text).encode())
    folder.chmod(0o755)
    _sync(folder)
    if output.exists():
        _exchange(folder, output)
    else:
        folder.rename(output)
    _sync(output.parent)
    return manifest


def copy(folder: Path, output: Path) -> None:
    """Copy an artifact whose files may be links, as in the cache of huggingface_hub, to `output`, where none is."""
    with stage(output, replace=False) as staged:
        shutil.copytree(folder, staged, dirs_exist_ok=True)
        staged.rename(output)


def as_text(manifest: Manifest) -> bytes:
    """Return the manifest as it is stored."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def _exchange(first: Path, second: Path) -> None:
    """Swap two names atomically (renameat2, RENAME_EXCHANGE); the old artifact ends in the staging folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(first), -100, os.fsencode(second), 2) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))


def _sha256_synced(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return digest


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with its size and hash; raise `ArtifactError` naming a missing, changed or unknown file.

    Anything but a regular file is refused without opening it.
    """
    check_files(folder, manifest.files, manifest.lengths, (MANIFEST, SIGNATURE))


def require_trust(folder: Path, why: str) -> None:
    """Raise unless this user made the artifact on this machine; `--trust-code` skips the call."""
    if not signed_here(folder):
        raise UnsafeSourceError(
            f"the artifact holds code ({why}) and was not made by this user on this machine",
            where=str(folder),
            hint="Pass --trust-code if you trust its author",
        )


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def size(folder: Path) -> int:
    """Sum the bytes of every file in an artifact."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
