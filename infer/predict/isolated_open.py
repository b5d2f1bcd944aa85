"""Trial opening of foreign artifacts in a subprocess: parsers in C++ can crash, hang or take all memory.

An artifact that this user made here is opened at once.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from ..artifact.store import signed_here
from ..device import memory_available
from ..errors import ArtifactError, InferError, ResourceError

PATIENCE = 300.0  # seconds to open it and run its golden inputs
LOOK = 0.01
NO_MEMORY = 7


def open_in_subprocess(folder: Path, *, trust_code: bool = False) -> None:
    """Open `folder` in a subprocess first.

    Raises `ArtifactError` where that ends the process or takes too long, `ResourceError` where it takes more memory
    than is free. Other faults are left to the real opening.
    """
    alone = threading.active_count() == 1  # others would not be there in the child, whatever they hold
    if trust_code or not alone or not sys.platform.startswith("linux") or signed_here(folder):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _open(folder)
    _raise_for_status(_wait_for_child(pid), folder)


def _open(folder: Path) -> None:
    """Open the artifact in the child process and exit with the command line's exit codes."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        most = _data_bytes() + int(memory_available("cpu"))
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        from .predictor import Predictor

        with Predictor.load(folder, threads=1):  # OpenMP's other threads are not in this process
            code = 0
    except InferError as error:
        code = error.exit_code
    except MemoryError:
        code = NO_MEMORY
    finally:
        os._exit(code)


def _data_bytes() -> int:
    """Private memory of this process; mapped weights are not among it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _wait_for_child(pid: int) -> int | None:
    """Wait for the child; its status, or None after `PATIENCE`, when it is killed."""
    deadline, done, status = time.monotonic() + PATIENCE, 0, 0
    try:
        while not done and time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                time.sleep(LOOK)
        return status if done else None
    finally:
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _raise_for_status(status: int | None, folder: Path) -> None:
    hint = "It was not made here, and is damaged or hostile: make it again from its source"
    if status is None:
        raise ArtifactError(
            f"opening the artifact takes more than {PATIENCE:.0f} s", where=str(folder), hint=hint
        )
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise ArtifactError(
            f"opening the artifact ends the process with {name}", where=str(folder), hint=hint
        )
    if os.WEXITSTATUS(status) == NO_MEMORY:
        raise ResourceError("opening the artifact takes more memory than is free", where=str(folder))
