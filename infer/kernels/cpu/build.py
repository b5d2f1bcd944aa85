"""The native library: compiled once for this machine, from the sources under `src`, into the user's cache.

Sources include each other by their path from `src`, and no two have the same name. Each file is compiled for the
instruction set that its name ends in, and the library picks one when it runs, so that one library serves every CPU of
an architecture. It is linked against torch's stable ABI and torch's own OpenMP runtime: there is one pool of threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ...errors import NotUsableError
from ...paths import cache as cache_folder

SOURCES = Path(__file__).with_name("src")
LIBRARY = "libinfer_kernels.so"
COMMON = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno"),
    "-ffp-contract=off",  # the same roundings on every machine; fused only where the source says so
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the oldest torch that is served: 2.11
)
# The end of a file's name → architecture and flags of the instruction set it is written for.
SUFFIXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "_avx512_vnni": (
        ("x86_64", "AMD64"),
        (
            *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw"),
            *("-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        ),
    ),
    "_avx2": (("x86_64", "AMD64"), ("-mavx2", "-mfma", "-mf16c")),
    "_neon_dotprod": (("aarch64", "arm64"), ("-march=armv8.2-a+dotprod",)),
}


def compiler() -> str | None:
    """Return the C++ compiler: $CXX, else the first of g++, clang++, c++ on the path; None without any."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def sources(machine: str = platform.machine(), folder: Path | None = None) -> dict[Path, tuple[str, ...]]:
    """Each file to compile for an architecture (a name of `platform.machine`), with its flags."""
    chosen = {}
    for path in sorted((folder or SOURCES).rglob("*.cpp")):
        suffix = next((s for s in sorted(SUFFIXES, key=len, reverse=True) if path.stem.endswith(s)), None)
        machines, flags = SUFFIXES[suffix] if suffix else ((machine,), ())
        if machine in machines:
            chosen[path] = flags
    return chosen


def digest(folder: Path | None = None) -> str:
    """Hash what a built library depends on: sources, flags, torch, architecture and compiler."""
    files = (path for path in (folder or SOURCES).rglob("*") if path.is_file())
    return _digest(sorted(files), repr(SUFFIXES))


def _digest(paths: Iterable[Path], *flags: str) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*COMMON, *flags, str(torch.__version__), platform.machine(), compiler() or ""):
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:16]


def _parts(path: Path, folder: Path | None = None) -> list[Path]:
    """Return a source file and every file of `folder` that it includes, directly or through another."""
    found = [path]
    for part in found:
        for name in re.findall(r'^#include "([^"]+)"', part.read_text(), re.MULTILINE):
            included = (folder or SOURCES) / name
            if included not in found:
                found.append(included)
    return found


def compiled() -> bool:
    """Tell if the cache has the library, or no compiler could make it."""
    return compiler() is None or (cache_folder("kernels") / digest() / LIBRARY).exists()


def library(progress: Callable[[int, int, str], None] | None = None) -> Path:
    """Return the path of the library, compiled first where the cache has none.

    `progress(done, total, name)` is called for each file. Raises `NotUsableError` without a compiler, or with the
    compiler's first message when it fails.
    """
    place = cache_folder("kernels") / digest()
    path = place / LIBRARY
    if path.exists():
        return path
    found = compiler()
    if found is None:
        raise NotUsableError("no C++ compiler", hint="Install g++, or name one with CXX")
    with _alone(place.parent), tempfile.TemporaryDirectory(dir=place.parent, prefix="build-") as work:
        if not path.exists():  # else another process has built it meanwhile
            # A copy: sources that change while they are compiled would be kept under the hash of others.
            copied = Path(shutil.copytree(SOURCES, Path(work) / "src"))
            path = place.parent / digest(copied) / LIBRARY
            built = _build(found, Path(work), copied, progress or (lambda done, total, what: None))
            path.parent.mkdir(exist_ok=True)
            built.replace(path)
    return path


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock, so that one of several starting processes compiles and the others wait for its result."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # let go of when the process ends, however it ends
        yield
    finally:
        os.close(handle)


def _build(found: str, work: Path, folder: Path, progress: Callable[[int, int, str], None]) -> Path:
    libraries = Path(torch.__file__).parent / "lib"
    includes = f"-I{folder}", f"-I{Path(torch.__file__).parent / 'include'}"
    files = sources(folder=folder)
    done = 0
    kept = cache_folder("kernels") / "objects"
    kept.mkdir(exist_ok=True)

    def compiled(path: Path) -> Path:
        nonlocal done
        target = kept / f"{path.stem}-{_digest(_parts(path, folder), *files[path])}.o"
        if not target.exists():
            fresh = work / target.name
            _run([found, *COMMON, *files[path], *includes, "-c", str(path), "-o", str(fresh)])
            fresh.replace(target)
        done += 1
        progress(done, len(files) + 1, path.name)
        return target

    with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        objects = [str(path) for path in pool.map(compiled, files)]
    target = work / LIBRARY
    _run([found, "-shared", "-fopenmp", "-o", str(target), *objects, f"-L{libraries}", "-ltorch_cpu"])
    progress(len(files) + 1, len(files) + 1, LIBRARY)
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotUsableError(f"the C++ compiler can't be started: {error}", hint="Check CXX") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NotUsableError(
            f"{Path(command[0]).name} can't compile the native kernels: {lines[0] if lines else done.returncode}",
            hint="Check the compiler, or use another with CXX",
        )
