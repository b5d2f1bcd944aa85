"""Files of an artifact: listing, and comparison with the manifest."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ..errors import ArtifactError
from ..regular_files import kind_of, open_regular

MAX_FILES, MAX_NAME = 100_000, 1024
BLOCK = 1 << 18
# A file that claims far more bytes than the disk stores of it would be read for hours.
SPARSE_BYTES, SPARSE_RATIO = 1 << 30, 64


def check_names(names: Iterable[str], folder: Path) -> None:
    """Raise `ArtifactError` unless each is the plain relative path of a file, different from all others."""
    seen: set[str] = set()
    for count, name in enumerate(names, 1):
        if count > MAX_FILES:
            raise ArtifactError(f"expected at most {MAX_FILES} files in the manifest", where=str(folder))
        plain = PurePosixPath(name)
        odd = not name or len(name) > MAX_NAME or plain.is_absolute() or ".." in plain.parts
        if odd or str(plain) != name or "\\" in name or not name.isprintable():
            raise ArtifactError(
                f"the manifest names a file that can't be one of it: {name[:80]!r}", where=str(folder)
            )
        if name.casefold() in seen:
            raise ArtifactError(
                f"the manifest names two files that differ in case only: {name!r}", where=str(folder)
            )
        seen.add(name.casefold())


def present(folder: Path, known: Iterable[str]) -> dict[str, os.stat_result]:
    """List every file below `folder` by relative path; nothing is opened.

    Raises `ArtifactError` at the first link, pipe, device or socket, and at a file that is not `known`.
    """
    allowed, found, folders = set(known), dict[str, os.stat_result](), [""]
    while folders:
        inside = folders.pop()
        try:
            entries = list(os.scandir(folder / inside))
        except OSError as error:
            raise ArtifactError(
                f"a folder can't be read: {error.strerror}", where=str(folder / inside)
            ) from error
        for entry in entries:
            name = f"{inside}{entry.name}"
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode) and name not in allowed:
                folders.append(f"{name}/")
            elif name not in allowed:
                raise ArtifactError(f"a file is not in the manifest: {_shown(name)}", where=str(folder))
            elif not stat.S_ISREG(info.st_mode):
                kind = kind_of(info.st_mode)
                raise ArtifactError(f"a file is {kind}: {_shown(name)}", where=str(folder))
            else:
                found[name] = info
    return found


def check_files(
    folder: Path, digests: Mapping[str, str], sizes: Mapping[str, int], beside: Iterable[str]
) -> None:
    """Compare every file with its size and sha256; `beside` lists files that the manifest does not name."""
    check_names(digests, folder)
    found = present(folder, {*digests, *beside})
    if absent := sorted(digests.keys() - found.keys()):
        raise ArtifactError(f"a file is missing: {absent[0]}", where=str(folder))
    for name in sorted(digests):
        _check_size(name, found[name], sizes.get(name), folder)
    for name, digest in hashes(folder, sorted(digests)):
        if digest != digests[name]:
            raise _damaged(name, "its sha256 differs from the manifest", folder)


def hashes(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and sha256 of each file, read by two threads."""
    with ThreadPoolExecutor(2) as pool:
        yield from zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True)


def _check_size(name: str, info: os.stat_result, size: int | None, folder: Path) -> None:
    if size is not None and info.st_size != size:
        raise _damaged(name, f"expected {size} bytes, got {info.st_size}", folder)
    if info.st_size > max(SPARSE_BYTES, SPARSE_RATIO * info.st_blocks * 512):
        stored = info.st_blocks * 512
        raise _damaged(name, f"of its {info.st_size} bytes the disk stores {stored}", folder)


def _sha256(path: Path) -> str:
    """Hash a regular file, limited to the size it had when opened."""
    with open_regular(path, follow_links=False, error=ArtifactError) as file:
        left, digest = os.fstat(file.fileno()).st_size, hashlib.sha256()
        block = memoryview(bytearray(BLOCK))
        raw = file.raw  # type: ignore[attr-defined]
        while left and (count := raw.readinto(block[: min(left, BLOCK)])):
            digest.update(block[:count])
            left -= count
        if left or raw.read(1):
            raise ArtifactError("the file changed while it was read", where=str(path))
    return digest.hexdigest()


def _damaged(name: str, why: str, folder: Path) -> ArtifactError:
    return ArtifactError(f"{name} is damaged: {why}", where=str(folder), hint="Make or copy it again")


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name.encode("utf-8", "surrogateescape"))[2:-1]
