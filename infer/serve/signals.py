"""Handling of SIGTERM and SIGINT before, during and after the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(BaseException):
    """Signal received before the server was ready."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raise `StoppedError` at the first signal, ignore further ones, and restore the previous handlers at the end.

    `Signals` replaces these handlers while the event loop runs. Does nothing outside the main thread.
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


def _stop(*_: object) -> None:
    ignore()
    raise StoppedError


def ignore() -> None:
    """Ignore further signals: the server is stopping."""
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)


class Signals:
    """Signals on the event loop: `first` is set by the first one, `second` by the next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = loop
        for number in NUMBERS:
            if sys.platform == "win32":
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._on_signal))
            else:
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def remove(self) -> None:
        """Remove the handlers and ignore signals while the workers are ended."""
        if sys.platform != "win32":
            for number in NUMBERS:
                self._loop.remove_signal_handler(number)
        ignore()
