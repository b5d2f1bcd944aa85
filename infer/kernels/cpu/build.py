"""The native library: the one of the installed wheel, else compiled once for this machine into the user's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ... import device
from ...errors import NotUsableError
from ...paths import cache as cache_folder
from . import compile_library
from .compile_library import LIBRARY, CompilerError, Progress, built_with, compiler

TORCH = Path(torch.__file__).parent
LOCK_SECONDS, LOCK_POLL_SECONDS = 600.0, 0.05  # for another process to compile the library
PREBUILT = Path(__file__).with_name(LIBRARY)  # only in wheels that were built with a compiler


# The best instruction sets first: what a CPU needs, and ends of the names of their files.
SETS: tuple[tuple[set[str], tuple[str, ...]], ...] = (
    ({"avx512f", "avx512bw", "avx512_vnni"}, ("_avx512_vnni", "_amx", "_avx512_bf16")),
    ({"avx2", "fma", "avx_vnni"}, ("_avx2", "_avx_vnni")),
    ({"avx2", "fma"}, ("_avx2",)),
    ({"dotprod"}, ("_neon_dotprod",)),
    (set(), (compile_library.SCALAR,)),
)


def sets() -> tuple[str, ...] | None:
    """Return the instruction sets to compile: the best one of this CPU, or all (None) with INFER_NATIVE=all."""
    if os.environ.get("INFER_NATIVE") == "all":
        return None
    return next(names for needed, names in SETS if needed.issubset(device.isa()))


def digest(folder: Path | None = None) -> str:
    """Hash what a library compiled here depends on: sources, flags, torch, architecture, compiler, instruction sets."""
    sources = compile_library.source_digest(folder)
    return compile_library.digest((), sources, *built_with(TORCH), *(sets() or ()))


def compiled() -> bool:
    """Return true if the library is in the wheel or the cache, or no compiler exists to build it."""
    return PREBUILT.exists() or compiler() is None or (cache_folder("kernels") / digest() / LIBRARY).exists()


def library(progress: Progress | None = None) -> Path:
    """Return the path of the library, compiled first where neither a wheel nor the cache has one.

    `progress(done, total, name)` is called for each file. Raises `NotUsableError` without a compiler, or with the
    compiler's first message when it fails.
    """
    if PREBUILT.exists():
        return PREBUILT
    place = cache_folder("kernels") / digest()
    path = place / LIBRARY
    if path.exists():
        return path
    found = compiler()
    if found is None:
        raise NotUsableError(
            "no C++ compiler, and infer was installed without its compiled kernels",
            hint="Install g++, name a compiler with CXX, or install infer from a wheel of this platform",
        )
    with _build_lock(place.parent), tempfile.TemporaryDirectory(dir=place.parent, prefix="build-") as work:
        if not path.exists():  # else another process has built it meanwhile
            # A copy: sources that change while they are compiled would be kept under the hash of others.
            copied = Path(shutil.copytree(compile_library.SOURCES, Path(work) / "src"))
            path = place.parent / digest(copied) / LIBRARY
            fresh = Path(work) / LIBRARY
            _compile(found, fresh, copied, progress or (lambda done, total, what: None))
            path.parent.mkdir(exist_ok=True)
            fresh.replace(path)
    return path


@contextmanager
def _build_lock(folder: Path) -> Iterator[None]:
    """Hold the build lock: one of several starting processes compiles, the others wait for its result.

    After `LOCK_SECONDS` this process compiles too: the lock only saves work, as results are put in place by a rename.
    """
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):  # the lock is freed when its process ends, however it does
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _compile(found: str, target: Path, folder: Path, progress: Progress) -> None:
    objects = cache_folder("kernels") / "objects"
    objects.mkdir(exist_ok=True)
    try:
        compile_library.compile_library(
            *(found, target),
            include=TORCH / "include",
            objects=objects,
            key=built_with(TORCH),
            folder=folder,
            sets=sets(),
            progress=progress,
        )
    except CompilerError as error:
        raise NotUsableError(str(error), hint="Check the compiler, or use another with CXX") from error
