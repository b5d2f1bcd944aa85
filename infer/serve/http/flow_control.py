"""Flow control of one connection: paused reading, and a timeout for clients that read too slowly."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from ..limits import ServeLimits


class ConnectionFlowControl(FlowControl):
    """uvicorn's flow control; while `blocked`, reading is not resumed until the current response is sent."""

    blocked = False

    def resume_reading(self) -> None:
        if not self.blocked:
            super().resume_reading()


class CountingTransport:
    """Transport wrapper that counts written bytes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.written = transport, 0
        self.is_closing = transport.is_closing  # called at every read: not through __getattr__

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

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
        self._timer = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        waiting = self._meter.waiting
        if waiting and self._meter.written - waiting - self._gone < self._least:
            self._meter.abort()
        elif waiting:
            self._wait()
