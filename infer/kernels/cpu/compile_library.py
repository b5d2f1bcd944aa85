"""Compilation of the native library from the sources under `src`.

Imports nothing but the standard library, so that a wheel is built without the dependencies of `infer`. Sources include
each other by their path from `src`; no two have the same name. Each is compiled for the instruction set that its name
ends in, and the library picks one when it runs: that of a wheel has them all and serves every CPU of an architecture.
Of torch it uses the stable C ABI of 2.11, so that one library serves every version from there on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
LIBRARY = "libinfer_kernels.so"
COMMON = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno"),
    "-ffp-contract=off",  # the same roundings on every machine; fused only where the source says so
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the oldest torch that is served: 2.11
)
X86 = ("x86_64", "AMD64")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512_VNNI = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# The end of a file's name → architecture and flags of the instruction set it is written for.
SUFFIXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "_avx512_vnni": (X86, AVX512_VNNI),
    "_amx": (X86, AVX512_VNNI),  # the tile instructions are written as assembly, which needs no flags
    "_avx512_bf16": (X86, AVX512_VNNI),  # the same
    "_avx_vnni": (X86, AVX2),  # the same
    "_avx2": (X86, AVX2),
    "_neon_dotprod": (("aarch64", "arm64"), ("-march=armv8.2-a+dotprod",)),
}
SCALAR = (
    "_scalar"  # the same end of a name without an instruction set: kernels for CPUs that have none of these
)
TORCH_LIBRARY = "libtorch_cpu.so"

Progress = Callable[[int, int, str], None]


class CompilerError(Exception):
    """Failure of the C++ compiler, with its first message."""


def compiler() -> str | None:
    """Return the C++ compiler: $CXX, else the first of g++, clang++, c++ on the path; None without any."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def built_with(torch: Path, machine: str = platform.machine()) -> tuple[str, str, str]:
    """Return what a compiled file depends on besides its source: torch's version, architecture and compiler."""
    found = re.search(r"^__version__ = '([^']+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else "", machine, compiler() or ""


def sources(
    machine: str = platform.machine(), folder: Path | None = None, sets: tuple[str, ...] | None = None
) -> dict[Path, tuple[str, ...]]:
    """Each file to compile for an architecture (a name of `platform.machine`), with its flags.

    `sets`: ends of names, of the instruction sets that are wanted; None: all of the architecture.
    """
    chosen = {}
    left_out = () if sets is None else tuple({*SUFFIXES, SCALAR}.difference(sets))
    for path in sorted((folder or SOURCES).rglob("*.cpp")):
        suffix = next((s for s in sorted(SUFFIXES, key=len, reverse=True) if path.stem.endswith(s)), None)
        machines, flags = SUFFIXES[suffix] if suffix else ((machine,), ())
        if machine in machines and not path.stem.endswith(left_out):
            chosen[path] = flags
    return chosen


def source_digest(folder: Path | None = None) -> str:
    """Hash what the numbers of a library depend on, whoever compiles it: sources and flags."""
    files = (path for path in (folder or SOURCES).rglob("*") if path.is_file())
    return digest(sorted(files), repr(SUFFIXES))


def digest(paths: Iterable[Path], *parts: str) -> str:
    """Hash files, by name and content, with the common flags and `parts`: 16 hexadecimal digits."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*COMMON, *parts):
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:16]


def included(path: Path, folder: Path | None = None) -> list[Path]:
    """Return a source file and every file of `folder` that it includes, directly or through another."""
    found = [path]
    for part in found:
        for name in re.findall(r'^#include "([^"]+)"', part.read_text(), re.MULTILINE):
            other = (folder or SOURCES) / name
            if other not in found:
                found.append(other)
    return found


def compile_library(
    command: str,
    target: Path,
    *,
    include: Path,
    objects: Path,
    key: Sequence[str] = (),
    folder: Path | None = None,
    machine: str = platform.machine(),
    sets: tuple[str, ...] | None = None,
    progress: Progress = lambda done, total, name: None,
) -> None:
    """Compile the sources of `folder` for `machine`, or of its instruction sets `sets`, and link them as `target`.

    `include` is the folder of torch's headers. Object files are kept in `objects` under a hash of what they are made
    of, to which `key` adds what `built_with` says. `progress(done, total, name)` is called for each file.
    Raises `CompilerError`.
    """
    folder = folder or SOURCES
    files = sources(machine, folder, sets)
    work = target.parent
    done = 0

    def compiled(path: Path) -> Path:
        nonlocal done
        kept = objects / f"{path.stem}-{digest(included(path, folder), *files[path], *key)}.o"
        if not kept.exists():
            fresh = work / kept.name
            includes = f"-I{folder}", f"-I{include}"
            run([command, *COMMON, *files[path], *includes, "-c", str(path), "-o", str(fresh)])
            shutil.move(fresh, kept)
        done += 1
        progress(done, len(files) + 1, path.name)
        return kept

    with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        made = [str(path) for path in pool.map(compiled, files)]
    _link(command, made, target)
    progress(len(files) + 1, len(files) + 1, target.name)


def _link(command: str, objects: Sequence[str], target: Path) -> None:
    """Link against an empty library by the name of torch's: the real one is looked up when the result is loaded.

    GCC's OpenMP is not linked: its functions are found in the runtime that torch has loaded, under whatever file name
    torch's wheel carries it, so that there is one pool of threads. Clang's has functions that torch's does not.
    """
    work = target.parent
    openmp = ["-fopenmp"] if "clang" in run([command, "--version"]) else []
    empty, stand_in = work / "empty.cpp", work / TORCH_LIBRARY
    empty.touch()
    run([command, "-shared", "-fPIC", str(empty), "-o", str(stand_in), f"-Wl,-soname,{TORCH_LIBRARY}"])
    needed = f"-L{work}", "-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,--as-needed"
    run([command, "-shared", *openmp, "-o", str(target), *objects, *needed])
    empty.unlink()
    stand_in.unlink()


def run(command: list[str]) -> str:
    """Run a compiler and return its output; raises `CompilerError`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompilerError(f"the C++ compiler can't be started: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        said = lines[0] if lines else str(done.returncode)
        raise CompilerError(f"{Path(command[0]).name} can't compile the native kernels: {said}")
    return done.stdout
