"""SIGTERM and SIGINT: before the event loop runs, while it runs, and after."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(BaseException):
    """A signal came while nothing was served yet."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """The first signal raises `StoppedError` here, further ones do nothing; what was set before is set again after.

    `Signals` take over while they live. On another thread than the main one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _stop) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(*_: Any) -> None:
    ignore()
    raise StoppedError


def ignore() -> None:
    """It is stopping already."""
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)


class Signals:
    """Counts them on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = loop
        for number in NUMBERS:
            if sys.platform == "win32":
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._hear))
            else:
                loop.add_signal_handler(number, self._hear)

    def _hear(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def remove(self) -> None:
        """From now on they are ignored: what is left to do is to end the workers."""
        if sys.platform != "win32":
            for number in NUMBERS:
                self._loop.remove_signal_handler(number)
        ignore()
