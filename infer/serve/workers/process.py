"""Start and end of a worker process that inherits nothing but the given descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ...errors import NotUsableError
from .channel import Channel, ClosedError
from .messages import ShutDown

END_SECONDS = 5.0  # for a worker that was asked to end


class WorkerProcess:
    """A running worker and its channel, which receives `kinds`; ended by `close` or `kill`.

    Create it on a thread that lives as long as the worker shall: Linux ends a child with the thread that
    started it.
    """

    def __init__(self, kinds: Any, descriptors: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *descriptors]
        command = [sys.executable, "-P", "-m", "infer.serve.workers", str(os.getpid()), *map(str, fds)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, env=env, pass_fds=fds, process_group=0
            )
        except OSError as error:
            ours.close()
            raise NotUsableError(f"no process could be started: {error.strerror}") from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.channel: Channel[Any] = Channel(ours, kinds)

    @property
    def exit(self) -> str:
        """Description of its exit status, after a short wait for it."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it hung up and runs on"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Kill the process; its memory is free on return."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def close(self) -> None:
        """Tell the process to end, and kill it after a timeout."""
        with contextlib.suppress(ClosedError):
            self.channel.send(ShutDown())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()


def process_age() -> float:
    """Return the seconds since this process was started, to 0.01 s; 0 where unknown."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
