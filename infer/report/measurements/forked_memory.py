"""Memory of many artifacts, each in a fork of one process that has imported torch and opened nothing.

A fresh process spends seconds of a core on imports, which a search of many trials would pay for each. A fork has
what the imports left: anonymous pages at once, pages of files after it has read them into its page table again
(`madvise(2)`, MADV_POPULATE_READ), because fork(2) does not copy those. So both ways measure the same.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from ...llm.step.step_shape import StepShape
from . import memory
from .memory import Memory

PR_SET_PDEATHSIG, MADV_POPULATE_READ = 1, 22
PRESENT = np.uint64(1 << 63)  # of an entry of /proc/PID/pagemap
TIMEOUT = 300.0  # seconds for one artifact
_SERVER = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "import infer.report.measurements.forked_memory as m; m.serve()"
)


class Artifact(msgspec.Struct, frozen=True):
    """Request: the artifact to open and run."""

    backend: str
    folder: str
    shape: StepShape | None = None


class ForkingProbe:
    """Measures artifacts like `memory.probe`, on the CPU in forks of one process, elsewhere in fresh ones.

    The process starts with the first artifact and ends with `close`, with this object or with this process.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def probe(
        self, backend: str, folder: Path, device: str = "cpu", *, shape: StepShape | None = None
    ) -> Memory:
        """Measure the memory of opening an artifact and running its golden inputs, in a fork or else a new process."""
        if device != "cpu" or sys.platform != "linux":
            return memory.probe(backend, folder, device, shape=shape)
        found = self._ask(Artifact(backend, str(folder.absolute()), shape))
        if found is None or found.failure:
            self.close()
            return memory.probe(backend, folder, device, shape=shape)
        stored = memory.stored_weights(folder)
        weights = sum(stored.values()) if stored else None
        return msgspec.structs.replace(found, weights=weights, weights_by_dtype=stored)

    def close(self) -> None:
        self._end()
        self._server = None

    def _ask(self, artifact: Artifact) -> Memory | None:
        """Return the server's answer; None when it ended or took too long."""
        if self._server is None:
            command = [sys.executable, "-W", "ignore", "-c", _SERVER, json.dumps(sys.path)]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            self._end = weakref.finalize(self, _end_server, self._server)
        server = self._server
        if server.stdin is None or server.stdout is None:
            return None
        try:
            server.stdin.write(msgspec.json.encode(artifact) + b"\n")
            line = _line(server.stdout.fileno(), TIMEOUT)
        except OSError:
            return None
        return msgspec.json.decode(line, type=Memory) if line.endswith(b"\n") else None


def _end_server(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.communicate()


def serve() -> None:
    """Answer each artifact on standard input with its memory on standard output, measured in a fork."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin.buffer:
        os.write(answers, msgspec.json.encode(_forked(msgspec.json.decode(line, type=Artifact))) + b"\n")


def _forked(artifact: Artifact) -> Memory:
    """Measure one artifact in a child process; return its failure where it ended without an answer."""
    pages = resident_file_pages()
    reads, writes = os.pipe()
    own = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reads)
        _in_child(artifact, pages, writes, own)
    os.close(writes)
    line = _line(reads, TIMEOUT)
    os.close(reads)
    if not line.endswith(b"\n"):
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if line.endswith(b"\n"):
        return msgspec.json.decode(line, type=Memory)
    return Memory(failure=f"the probe ended with exit code {status}")


def _in_child(artifact: Artifact, pages: list[tuple[int, int]], writes: int, parent: int) -> None:
    """Measure, write the answer and end; never returns."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        populate(pages)
        found = memory.measure_opened(artifact.backend, Path(artifact.folder), "cpu", artifact.shape)
    except BaseException as error:  # noqa: BLE001 - of a library: a fresh process says what is wrong
        found = Memory(failure=f"{type(error).__name__}: {error}")
    os.write(writes, msgspec.json.encode(found) + b"\n")
    os._exit(0)


def resident_file_pages() -> list[tuple[int, int]]:
    """List the runs of pages (first address, bytes) of files that this process has in its page table."""
    found = []
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        for start, stop in _file_mappings():
            table.seek(start // mmap.PAGESIZE * 8)
            entries = np.frombuffer(table.read((stop - start) // mmap.PAGESIZE * 8), np.uint64)
            present = np.concatenate([[False], (entries & PRESENT) != 0, [False]])
            edges = np.flatnonzero(present[1:] != present[:-1]).reshape(-1, 2)
            found += [(start + int(a) * mmap.PAGESIZE, int(b - a) * mmap.PAGESIZE) for a, b in edges]
    return found


def _file_mappings() -> list[tuple[int, int]]:
    """List addresses (start, stop) of the readable mappings of files."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, number, *name = line.split(maxsplit=5)
        if number != "0" and rights.startswith("r") and name and name[0].startswith("/"):
            start, stop = (int(text, 16) for text in place.split("-"))
            found.append((start, stop))
    return found


def populate(pages: list[tuple[int, int]]) -> None:
    """Read pages into the page table of this process; raises `OSError` where the kernel can't (before Linux 5.14)."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, length in pages:
        if library.madvise(start, length, MADV_POPULATE_READ) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _line(handle: int, seconds: float) -> bytes:
    """Read up to the end of a line; less when the other side ended or the seconds are over."""
    line, end = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0 or not select.select([handle], [], [], left)[0]:
            break
        piece = os.read(handle, 1 << 16)
        if not piece:
            break
        line += piece
    return line
