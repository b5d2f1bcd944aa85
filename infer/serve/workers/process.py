"""A worker process: started with inherited descriptors only, ended for certain."""

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
from .messages import Close

END_SECONDS = 5.0  # for a worker that was asked to end


class Process:
    """A running worker and the channel to it, which receives what `kinds` names. Ends with its `close` or `kill`.

    To be made on a thread that lives as long as the worker shall: Linux ends a child with the thread that started it.
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
        """How it ended, in words; waits for that a moment."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it hung up and runs on"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """At once, whatever it does; its memory is free when this returns."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def close(self) -> None:
        """Ask it to end, and kill it when it doesn't."""
        with contextlib.suppress(ClosedError):
            self.channel.send(Close())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()


def age() -> float:
    """Seconds since this process was started, to a hundredth; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
