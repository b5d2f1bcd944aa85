"""Memory of artifacts, each in a fork of a process that has imported what opening needs and opened nothing.

A fresh process spends seconds of a core on imports, which a search of many trials would pay for each, and a run at its
end, although a core is free while it compares. There is one process that has imported torch, and below it one for each
backend with the libraries of that. A fork has what the
imports left: anonymous pages at once, pages of files after it has read them into its page table again
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
from .memory import Imported, Memory

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
    """Measures artifacts like `memory.probe`, on the CPU in forks of a process of the backend, elsewhere in fresh ones.

    The process starts with `start` or the first artifact, and ends with `close`, with this object or with this process.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self, device: str = "cpu") -> None:
        """Start the process, which imports for some seconds, so that the first artifact need not wait for it."""
        if self._server is None and device == "cpu" and sys.platform == "linux":
            command = [sys.executable, "-W", "ignore", "-c", _SERVER, json.dumps(sys.path)]
            # In a session of its own: an interrupt of the terminal is for the run, whose end ends it. What libraries
            # print in it is nobody's; failures come as answers.
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            self._end = weakref.finalize(self, _end_server, self._server)

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
        self.start()
        server = self._server
        if server is None or server.stdin is None or server.stdout is None:
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
    """Answer each artifact on standard input with its memory, measured below the process of its backend."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    servers: dict[str, tuple[int, int]] = {}
    memory.import_caller()
    for line in sys.stdin.buffer:
        backend = msgspec.json.decode(line, type=Artifact).backend
        if backend not in servers:
            servers[backend] = _backend_server(backend)
        if not (found := _relayed(line, *servers[backend])):
            for descriptor in servers.pop(backend):  # a late answer would be taken for the next artifact's
                os.close(descriptor)
            failed = Memory(failure="the process of the backend ended without an answer")
            found = msgspec.json.encode(failed) + b"\n"
        os.write(answers, found)


def _relayed(line: bytes, asks: int, answers: int) -> bytes:
    """Pass a question on to the process of a backend; return its answer, empty where it gave none."""
    try:
        os.write(asks, line)
        found = _line(answers, TIMEOUT)
    except OSError:
        return b""
    return found if found.endswith(b"\n") else b""


def _backend_server(backend: str) -> tuple[int, int]:
    """Fork the process of a backend; return where it is asked and where it answers."""
    pages, own = resident_file_pages(), os.getpid()
    asked, asks = os.pipe()
    answers, writes = os.pipe()
    if os.fork() == 0:
        os.close(asks)
        os.close(answers)
        _in_backend_server(backend, pages, asked, writes, own)
    os.close(asked)
    os.close(writes)
    return asks, answers


def _in_backend_server(
    backend: str, pages: list[tuple[int, int]], asked: int, writes: int, parent: int
) -> None:
    """Import the libraries of a backend and measure each artifact in a fork; never returns."""
    try:
        _end_with(parent)
        populate(pages)
        imported = memory.import_libraries(backend)
        with os.fdopen(asked, "rb") as questions:
            for line in questions:
                found = _forked(msgspec.json.decode(line, type=Artifact), imported)
                os.write(writes, msgspec.json.encode(found) + b"\n")
    except BaseException as error:  # noqa: BLE001 - of a library: a fresh process says what is wrong
        os.write(writes, msgspec.json.encode(Memory(failure=f"{type(error).__name__}: {error}")) + b"\n")
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent, also one that has ended by now."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _forked(artifact: Artifact, imported: Imported) -> Memory:
    """Measure one artifact in a child process; return its failure where it ended without an answer."""
    pages = resident_file_pages()
    reads, writes = os.pipe()
    own = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reads)
        _in_child(artifact, imported, pages, writes, own)
    os.close(writes)
    line = _line(reads, TIMEOUT)
    os.close(reads)
    if not line.endswith(b"\n"):
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if line.endswith(b"\n"):
        return msgspec.json.decode(line, type=Memory)
    return Memory(failure=f"the probe ended with exit code {status}")


def _in_child(
    artifact: Artifact, imported: Imported, pages: list[tuple[int, int]], writes: int, parent: int
) -> None:
    """Measure, write the answer and end; never returns."""
    try:
        _end_with(parent)
        populate(pages)
        folder = Path(artifact.folder)
        found = memory.measure_opened(artifact.backend, folder, "cpu", artifact.shape, imported)
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
