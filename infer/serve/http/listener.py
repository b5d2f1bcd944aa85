"""Listening socket: its address, its TLS handshakes, and its limit of connections by the limit of open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...errors import BusyError, NotUsableError, ResourceError, UsageError
from ..limits import LOOPBACK, ServeLimits

RESERVE = 64  # files for models, logs and threads opened later
WORKER = 8  # files of one worker process: channel, shared memory
LEAST = 8  # connections


@contextlib.contextmanager
def listen(
    host: str,
    port: int,
    *,
    api_key: str | Sequence[str] | None = None,
    anonymous: bool = False,
    option: str = "--port",
) -> Iterator[socket.socket]:
    """Bind a socket without listening: until the models are warm, connections are refused.

    Raises `UsageError` for an address that other machines reach without `api_key` or `anonymous`, `BusyError` for a
    port in use, `NotUsableError` for another error of the system.
    """
    require_key(host, api_key, anonymous=anonymous)
    if not 0 <= port < 65536:
        raise UsageError(f"expected a port of 0 to 65535, got {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageError(f"host {host!r} does not resolve to an address") from error
    with socket.socket(family, kind, proto) as listener:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with port_errors(host, port, option):
            listener.bind(address)
        yield listener


def require_key(host: str, api_key: str | Sequence[str] | None, *, anonymous: bool) -> None:
    """Raise `UsageError` for an address that other machines reach without `api_key` or `anonymous`."""
    if host not in LOOPBACK and not api_key and not anonymous:
        raise UsageError(
            f"{host} can be reached from other machines, and no API key is set",
            hint="Set --api-key (or INFER_API_KEY), or say --anonymous",
        )


def address_of(listener: socket.socket) -> str:
    """Return the address of a bound socket as HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def port_errors(host: str, port: int, option: str = "--port") -> Iterator[None]:
    """Raise `BusyError` or `NotUsableError` for an `OSError` of this port."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BusyError(
                f"port {port} of {host} is taken", hint=f"Choose another {option}, or 0 for any"
            ) from error
        raise NotUsableError(f"can't serve at {host}:{port}: {error.strerror}") from error


def fit_connections(limits: ServeLimits, workers: int = 0) -> tuple[ServeLimits, str | None]:
    """Return limits with as many connections as files may be open, and a warning if these are fewer than configured.

    Raises the soft limit of this process as far as needed and allowed. `workers`: number of worker processes that will
    be started. Raises `ResourceError` for fewer than `LEAST` connections.
    """
    if sys.platform == "win32":
        return limits, None
    import resource

    reserve = RESERVE + WORKER * workers
    used = _open_now() + reserve
    wanted = used + limits.max_connections + limits.spare_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits, None
    room = soft - _open_now() - min(reserve, soft // 4)
    spare = min(limits.spare_connections, max(room // 8, 1))
    cap = room - spare
    if cap < LEAST:
        raise ResourceError(
            f"only {soft} files may be open, which leaves {max(cap, 0)} for connections",
            hint=f"Raise it: ulimit -n {wanted}",
        )
    warning = f"only {soft} files may be open: at most {cap} connections instead of {limits.max_connections}"
    fitted = msgspec.structs.replace(limits, max_connections=cap, spare_connections=spare)
    return fitted, f"{warning} (ulimit -n {wanted} would do)"


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 32


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
