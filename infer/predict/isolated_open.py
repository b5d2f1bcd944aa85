"""Trial opening of foreign artifacts in a subprocess: parsers in C++ can crash, hang or take all memory.

An artifact that this user made here is opened at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from ..artifact.store import signed_here
from ..device import memory_available
from ..errors import ArtifactError, InferError, ResourceError
from ..process import child
from ..process.spawn import describe_exit

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
    _raise_for_exit(_wait_for_child(child.fork(lambda: _open(folder))), folder)


def _open(folder: Path) -> int:
    """Open the artifact in the child process; return the command line's exit code."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        child.confine(data=int(memory_available("cpu")))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        from .predictor import Predictor

        with Predictor.load(folder, threads=1):  # OpenMP's other threads are not in this process
            return 0
    except InferError as error:
        return error.exit_code
    except MemoryError:
        return NO_MEMORY


def _wait_for_child(pid: int) -> int | None:
    """Wait for the child; its exit code, or None after `PATIENCE`, when it is killed."""
    deadline, done, status = time.monotonic() + PATIENCE, 0, 0
    try:
        while not done and time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                time.sleep(LOOK)
        return os.waitstatus_to_exitcode(status) if done else None
    finally:
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _raise_for_exit(code: int | None, folder: Path) -> None:
    hint = "It was not made here, and is damaged or hostile: make it again from its source"
    if code is None:
        raise ArtifactError(
            f"opening the artifact takes more than {PATIENCE:.0f} s", where=str(folder), hint=hint
        )
    if code < 0:
        raise ArtifactError(
            f"opening the artifact ends the process with {describe_exit(code)}", where=str(folder), hint=hint
        )
    if code == NO_MEMORY:
        raise ResourceError("opening the artifact takes more memory than is free", where=str(folder))
