"""Memory of artifacts, each in a fork of a process that has imported what opening needs and opened nothing.

A fresh process spends seconds of a core on imports, which a search of many trials would pay for each, and a run at its
end, although a core is free while it compares. There is one process that has imported torch, and below it one for each
backend with the libraries of that. A fork has what the
imports left: anonymous pages at once, pages of files after it has read them into its page table again
(`madvise(2)`, MADV_POPULATE_READ), because fork(2) does not copy those. So both ways measure the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...llm.step.step_shape import StepShape
from ...process import child
from ...process.channel import Channel, ClosedError
from ...process.spawn import ChildProcess, describe_exit
from . import memory
from .memory import Imported, Memory

MADV_POPULATE_READ = 22
PRESENT = np.uint64(1 << 63)  # of an entry of /proc/PID/pagemap
TIMEOUT = 300.0  # seconds for one artifact


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
        self._server: ChildProcess | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self, device: str = "cpu") -> None:
        """Start the process, which imports for some seconds, so that the first artifact need not wait for it."""
        if self._server is None and device == "cpu" and sys.platform == "linux":
            # What libraries print in it is nobody's; failures come as answers.
            self._server = ChildProcess(__name__, Memory, output=subprocess.DEVNULL)
            self._end = weakref.finalize(self, self._server.kill)

    def probe(
        self, backend: str, folder: Path, device: str = "cpu", *, shape: StepShape | None = None
    ) -> Memory:
        """Measure the memory of opening an artifact and running its golden inputs, in a fork or else a new process."""
        if device != "cpu" or sys.platform != "linux":
            return memory.probe(backend, folder, device, shape=shape)
        measured = self._ask(Artifact(backend, str(folder.absolute()), shape))
        if measured is None or measured.failure:
            self.close()
            return memory.probe(backend, folder, device, shape=shape)
        stored = memory.stored_weights(folder)
        weights = sum(stored.values()) if stored else None
        return msgspec.structs.replace(measured, weights=weights, weights_by_dtype=stored)

    def close(self) -> None:
        self._end()
        self._server = None

    def _ask(self, artifact: Artifact) -> Memory | None:
        """Return the server's answer; None when it ended or took too long."""
        self.start()
        return None if self._server is None else _answer(self._server.channel, artifact)


def _answer(channel: Channel[Any], artifact: Artifact) -> Memory | None:
    """Return the answer of the process at the other end; None when it ended or took too long."""
    with contextlib.suppress(ClosedError):
        channel.send(artifact)
        return channel.receive(TIMEOUT)
    return None


class _Fork:
    """A forked process that measures artifacts, by what `prepare` returns there."""

    def __init__(self, prepare: Callable[[], Callable[[Artifact], Memory]]) -> None:
        pages = resident_file_pages()
        ours, theirs = socket.socketpair()

        def serve() -> None:
            ours.close()
            populate(pages)
            _serve(Channel(theirs, Artifact), prepare)

        self._pid = child.fork(serve)
        theirs.close()
        self._channel: Channel[Any] = Channel(ours, Memory)

    def measure(self, artifact: Artifact) -> Memory | None:
        """Return the memory of an artifact; None when the process ended or took too long."""
        return _answer(self._channel, artifact)

    def close(self) -> Memory:
        """End the process, whose late answer would be taken for that of the next artifact; return how it ended."""
        os.kill(self._pid, signal.SIGKILL)
        self._channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return Memory(failure=f"the process of the probe ended: {describe_exit(code)}")


def _serve(channel: Channel[Any], prepare: Callable[[], Callable[[Artifact], Memory]]) -> None:
    """Answer artifacts until the other side closes the channel."""
    try:
        measure = prepare()
        while (artifact := channel.receive()) is not None:
            channel.send(measure(artifact))
    except ClosedError:
        return
    except BaseException as error:  # noqa: BLE001 - of a library: a fresh process says what is wrong
        channel.send(Memory(failure=f"{type(error).__name__}: {error}"))


def _process_of_all() -> Callable[[Artifact], Memory]:
    """Prepare the process that has imported torch, and forks one for each backend."""
    forks: dict[str, _Fork] = {}
    memory.import_caller()

    def measure(artifact: Artifact) -> Memory:
        if (backend := artifact.backend) not in forks:
            forks[backend] = _Fork(partial(_process_of_backend, backend))
        return forks[backend].measure(artifact) or forks.pop(backend).close()

    return measure


def _process_of_backend(backend: str) -> Callable[[Artifact], Memory]:
    """Prepare the process that has imported the libraries of a backend, and forks one for each artifact."""
    imported = memory.import_libraries(backend)

    def measure(artifact: Artifact) -> Memory:
        fork = _Fork(lambda: partial(_measure, imported))
        measured = fork.measure(artifact)
        ended = fork.close()
        return measured or ended

    return measure


def _measure(imported: Imported, artifact: Artifact) -> Memory:
    return memory.measure_opened(artifact.backend, Path(artifact.folder), "cpu", artifact.shape, imported)


def resident_file_pages() -> list[tuple[int, int]]:
    """List the runs of pages (first address, bytes) of files that this process has in its page table."""
    runs = []
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        for start, stop in _file_mappings():
            table.seek(start // mmap.PAGESIZE * 8)
            entries = np.frombuffer(table.read((stop - start) // mmap.PAGESIZE * 8), np.uint64)
            present = np.concatenate([[False], (entries & PRESENT) != 0, [False]])
            edges = np.flatnonzero(present[1:] != present[:-1]).reshape(-1, 2)
            runs += [(start + int(a) * mmap.PAGESIZE, int(b - a) * mmap.PAGESIZE) for a, b in edges]
    return runs


def _file_mappings() -> list[tuple[int, int]]:
    """List addresses (start, stop) of the readable mappings of files."""
    mappings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, number, *name = line.split(maxsplit=5)
        if number != "0" and rights.startswith("r") and name and name[0].startswith("/"):
            start, stop = (int(text, 16) for text in place.split("-"))
            mappings.append((start, stop))
    return mappings


def populate(pages: list[tuple[int, int]]) -> None:
    """Read pages into the page table of this process; raises `OSError` where the kernel can't (before Linux 5.14)."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, length in pages:
        if library.madvise(start, length, MADV_POPULATE_READ) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def main(arguments: list[str]) -> int:
    parent, descriptor = map(int, arguments)
    child.end_with_parent(parent)
    _serve(Channel(socket.socket(fileno=descriptor), Artifact), _process_of_all)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
