"""Parts of a connection: its writes, flow control, the timeout of slow readers, and its handle for the application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from ..limits import ServeLimits


class CountingTransport:
    """Transport wrapper that counts written bytes, and joins those written between `cork` and `uncork`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.written = transport, 0
        self._corked: list[bytes] | None = None
        self.is_closing = transport.is_closing  # called at every read: not through __getattr__

    def write(self, data: bytes) -> None:
        self.written += len(data)
        if self._corked is None:
            self._transport.write(data)
        else:
            self._corked.append(data)

    def cork(self) -> None:
        """Hold back what is written until `uncork`, `close` or `write_eof`."""
        self._corked = []

    def uncork(self) -> None:
        """Write all that was held back at once: each write is a system call."""
        corked, self._corked = self._corked, None
        if corked:
            self._transport.write(b"".join(corked))

    def close(self) -> None:
        self.uncork()
        self._transport.close()

    def write_eof(self) -> None:
        self.uncork()
        self._transport.write_eof()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def waiting(self) -> int:
        """Bytes in the write buffer."""
        return self._transport.get_write_buffer_size()


class SlowReaderTimeout:
    """Abort of a connection that sends less than `min_bytes_per_second` over `send_seconds` while bytes wait."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, meter: CountingTransport, limits: ServeLimits
    ) -> None:
        self._loop, self._meter, self._seconds = loop, meter, limits.send_seconds
        self._least = limits.min_bytes_per_second * limits.send_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._gone = 0  # bytes sent at the last check

    def begin(self) -> None:
        """Start the timer if bytes wait to be sent."""
        if self._timer is None and self._meter.waiting:
            self._wait()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._gone = self._meter.written - self._meter.waiting
        self._timer = self._loop.call_later(self._seconds, self._check_progress)

    def _check_progress(self) -> None:
        self._timer = None
        waiting = self._meter.waiting
        if waiting and self._meter.written - waiting - self._gone < self._least:
            self._meter.abort()
        elif waiting:
            self._wait()


class ConnectionFlowControl(FlowControl):
    """uvicorn's flow control; while `blocked`, reading is not resumed until the current response is sent."""

    blocked = False

    def resume_reading(self) -> None:
        if not self.blocked:
            super().resume_reading()


class ConnectionHandle:
    """Connection as the application sees it, in `scope["state"]["connection"]`."""

    def __init__(self, meter: CountingTransport, flow: ConnectionFlowControl) -> None:
        self._meter, self._flow = meter, flow
        self._gone: Callable[[], None] | None = None
        self.lost = False

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` once when the client disconnects, until `unwatch`; at once where it has."""
        self._flow.resume_reading()  # paused after a large body: a closed connection would not be noticed
        if self.lost:
            gone()
        else:
            self._gone = gone

    def unwatch(self) -> None:
        self._gone = None

    def lose(self) -> None:
        """Note that the client disconnected, or is being disconnected."""
        self.lost = True
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    @contextlib.contextmanager
    def one_write(self) -> Iterator[None]:
        """Send all that is written inside as one write."""
        self._meter.cork()
        try:
            yield
        finally:
            self._meter.uncork()
