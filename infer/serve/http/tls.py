"""TLS context, and TLS handshakes that count as connections and have a deadline."""

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
    """Return a context for TLS 1.2 or newer with this PEM certificate chain. Raises `UsageError`.

    `keyfile`: private key, by default in `certfile`; `password`: of the key.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    named = str(keyfile or certfile)
    for path in (str(certfile), named):
        if not os.path.isfile(path):
            raise UsageError("no such file", where=path)
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: password or "")
    except ssl.SSLError as error:
        hint = "Give --ssl-keyfile-password if the key is locked"
        raise UsageError(
            f"cannot load the TLS certificate and key ({error.reason})", where=named, hint=hint
        ) from error
    except OSError as error:
        raise UsageError(f"can't read the certificate: {error.strerror}", where=str(certfile)) from error
    return context


class TlsHandshake(asyncio.Protocol):
    """Connection during its handshake; afterwards `protocol` takes it over, with the bytes that arrived meanwhile."""

    def __init__(self, protocol: Any, tls: ssl.SSLContext) -> None:
        self._protocol, self._tls = protocol, tls
        self._early: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.pause_reading()
        connections = self._protocol.connections
        connections.add(self)
        limits = self._protocol.limits
        if len(connections) > limits.max_connections + limits.spare_connections:
            self._end()
            return
        self._task = asyncio.get_running_loop().create_task(self._shake(transport))

    async def _shake(self, transport: asyncio.Transport) -> None:
        loop, limits = asyncio.get_running_loop(), self._protocol.limits
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
        self._protocol.connections.discard(self)
        if secure is None or secure.is_closing():
            self._end()
            return
        secure.set_protocol(self._protocol)
        self._protocol.connection_made(secure)
        for data in self._early:
            self._protocol.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connections.discard(self)

    def shutdown(self) -> None:
        """Close the connection; called by uvicorn at shutdown."""
        self._end()

    def _end(self) -> None:
        self._protocol.connections.discard(self)
        if self._transport is not None:
            self._transport.abort()
