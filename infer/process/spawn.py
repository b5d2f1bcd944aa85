"""Parent process side: Python processes that are started afresh, with a channel or for one answer, and how they ended.

Each has the import path of this process, and its id as the first argument, for `child.end_with_parent`. It leads a
session of its own, because an interrupt of the terminal is for the parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import NotUsableError
from .channel import Channel, ClosedError

END_SECONDS = 5.0  # for a process that was asked to end
STDERR = 2


def spawn(
    module: str,
    arguments: Sequence[object] = (),
    descriptors: Sequence[int] = (),
    output: int | IO[Any] = STDERR,
) -> subprocess.Popen[bytes]:
    """Start `python -m module PARENT ARGUMENT…`, which inherits `descriptors`; what it prints goes to `output`.

    Start it on a thread that lives as long as it shall: Linux ends a child with the thread that started it. Raises
    `NotUsableError` where the system starts no process.
    """
    try:
        return subprocess.Popen(
            _command(module, arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            pass_fds=descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise NotUsableError(f"no process could be started: {error.strerror}") from error


def run(
    target: str | Path, arguments: Sequence[object] = (), *, given: bytes = b"", timeout: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a module or a file of Python code with `given` as its input, and return its exit and output.

    Raises `TimeoutError` after `timeout` seconds, when it is killed.
    """
    try:
        return subprocess.run(
            _command(target, arguments),
            input=given,
            capture_output=True,
            timeout=timeout,
            env=_environment(),
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from error


def describe_exit(code: int) -> str:
    """Return `exit code 3`, or `signal SIGKILL` for the code -9 of a process that a signal ended."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


class ChildProcess:
    """Process that runs `module`, and its channel, which receives `kinds`; ended by `close` or `kill`.

    The first argument of the module after its parent is the descriptor of the channel; see `spawn` for the others.
    """

    def __init__(
        self,
        module: str,
        kinds: Any,
        descriptors: Sequence[int] = (),
        output: int | IO[Any] = STDERR,
    ) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *descriptors]
        try:
            self._process = spawn(module, fds, fds, output)
        except NotUsableError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.channel: Channel[Any] = Channel(ours, kinds)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float = END_SECONDS) -> int | None:
        """Return the exit code, as `describe_exit` takes it; None where the process runs on after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def terminate(self) -> None:
        """Ask the process to end by SIGTERM, and wait for so long as `wait` does."""
        self._process.terminate()
        self.wait()

    def kill(self) -> None:
        """Kill the process; its memory is free on return."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def close(self, last: Any) -> None:
        """Send a last message, which asks the process to end, and kill it after a timeout."""
        with contextlib.suppress(ClosedError):
            self.channel.send(last)
        self.wait()
        self.kill()


def _command(target: str | Path, arguments: Sequence[object]) -> list[str]:
    code = [str(target)] if isinstance(target, Path) else ["-m", target]
    return [sys.executable, "-P", *code, str(os.getpid()), *map(str, arguments)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)}
