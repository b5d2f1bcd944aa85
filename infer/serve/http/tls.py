"""TLS by two files, under uvicorn's names. Handshakes count as connections and have their own deadline."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Any

from ...errors import UsageError


def tls_context(
    certfile: str | os.PathLike[str],
    keyfile: str | os.PathLike[str] | None = None,
    password: str | None = None,
) -> ssl.SSLContext:
    """TLS 1.2 or newer with this chain (PEM; the key may stand in the same file). Raises `UsageError`."""
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.set_alpn_protocols(["http/1.1"])
    named = str(keyfile or certfile)
    for path in (str(certfile), named):
        if not os.path.isfile(path):
            raise UsageError("there is no such file", where=path)
    try:
        made.load_cert_chain(certfile, keyfile, password=lambda: password or "")
    except ssl.SSLError as error:
        hint = "Give --ssl-keyfile-password if the key is locked"
        raise UsageError(
            f"no certificate and key for TLS ({error.reason})", where=named, hint=hint
        ) from error
    except OSError as error:
        raise UsageError(f"can't read the certificate: {error.strerror}", where=str(certfile)) from error
    return made


class TlsHandshake(asyncio.Protocol):
    """A connection before its handshake; after it, `wire` has the connection, and what came meanwhile."""

    def __init__(self, wire: Any, tls: ssl.SSLContext) -> None:
        self._wire, self._tls = wire, tls
        self._early: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.pause_reading()
        crowd = self._wire.connections
        crowd.add(self)
        limits = self._wire.limits
        if len(crowd) > limits.max_connections + limits.spare_connections:
            self._end()
            return
        self._task = asyncio.get_running_loop().create_task(self._shake(transport))

    async def _shake(self, transport: asyncio.Transport) -> None:
        loop, limits = asyncio.get_running_loop(), self._wire.limits
        try:
            secure = await loop.start_tls(
                transport,
                self,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=limits.header_seconds,
                ssl_shutdown_timeout=limits.header_seconds,
            )
        except (OSError, TimeoutError):
            self._end()
            return
        self._wire.connections.discard(self)
        if secure is None or secure.is_closing():
            self._end()
            return
        secure.set_protocol(self._wire)
        self._wire.connection_made(secure)
        for data in self._early:
            self._wire.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wire.connections.discard(self)

    def shutdown(self) -> None:
        """As uvicorn asks every connection when it ends."""
        self._end()

    def _end(self) -> None:
        self._wire.connections.discard(self)
        if self._transport is not None:
            self._transport.abort()
