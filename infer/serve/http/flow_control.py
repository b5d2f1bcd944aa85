"""What flows to and from one client: reading that can be held up, and clients too slow to read their answers."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from ..limits import ServeLimits


class ConnectionFlowControl(FlowControl):
    """`blocked`: nothing more is read, whoever asks, until the answer under way is sent."""

    blocked = False

    def resume_reading(self) -> None:
        if not self.blocked:
            super().resume_reading()


class CountingTransport:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self.written = transport, 0
        self.is_closing = transport.is_closing  # asked with every read: not by way of __getattr__

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def waiting(self) -> int:
        return self._transport.get_write_buffer_size()


class SlowReaderTimeout:
    """While bytes wait to be sent, enough of them must go in every `send_seconds`; else the connection is cut."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, meter: CountingTransport, limits: ServeLimits
    ) -> None:
        self._loop, self._meter, self._seconds = loop, meter, limits.send_seconds
        self._least = limits.min_bytes_per_second * limits.send_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._gone = 0  # bytes that had left when last looked at

    def begin(self) -> None:
        """To be called when bytes may have to wait."""
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
