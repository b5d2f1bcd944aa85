"""Wakes a thread that waits, by a byte in a pipe, so that it can wait for sockets too."""

from __future__ import annotations

import contextlib
import os
import select
import threading


class Wakeup:
    """Any thread rings, one thread waits. Rings while nobody waits count as one; after `close` they do nothing."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock, self._closed = threading.Lock(), False

    def ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it rings already
            if not self._closed:
                os.write(self._write, b"!")

    def wait(self, seconds: float, other: int = -1) -> None:
        """Until it rings, `other` (a descriptor) is readable, or the time is over."""
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
