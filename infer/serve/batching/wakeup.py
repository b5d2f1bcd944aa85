"""Wake-up of a waiting thread through a pipe, so that it can wait for sockets as well."""

from __future__ import annotations

import contextlib
import os
import select
import threading


class Wakeup:
    """Event that any thread sets and one thread waits for. Several calls wake it once; none after `close`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock, self._closed = threading.Lock(), False

    def notify(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: a notification is pending
            if not self._closed:
                os.write(self._write, b"!")

    def wait(self, seconds: float, other: int = -1) -> None:
        """Wait for a notification, until descriptor `other` is readable, or for `seconds`."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if other >= 0:
            poll.register(other, select.POLLIN)
        poll.poll(1000 * seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)
