"""Listening socket: which addresses may be bound, and the line printed at startup."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator, Sequence

from ...errors import BusyError, NotUsableError, UsageError
from ..limits import LOOPBACK
from ..service import Service


@contextlib.contextmanager
def listen(
    host: str, port: int, *, api_key: str | Sequence[str] | None = None, anonymous: bool = False
) -> Iterator[socket.socket]:
    """Bind a socket without listening: until the models are warm, connections are refused.

    Raises `UsageError` for an address that other machines reach without `api_key` or `anonymous`, `BusyError` for a
    port in use, `NotUsableError` for another error of the system.
    """
    if host not in LOOPBACK and not api_key and not anonymous:
        raise UsageError(
            f"{host} can be reached from other machines, and no API key is set",
            hint="Set --api-key (or INFER_API_KEY), or say --anonymous",
        )
    if not 0 <= port < 65536:
        raise UsageError(f"expected a port of 0 to 65535, got {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageError(f"host {host!r} does not resolve to an address") from error
    with socket.socket(family, kind, proto) as listener:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with port_errors(host, port):
            listener.bind(address)
        yield listener


@contextlib.contextmanager
def port_errors(host: str, port: int) -> Iterator[None]:
    """Raise `BusyError` or `NotUsableError` for an `OSError` of this port."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BusyError(
                f"port {port} of {host} is taken", hint="Choose another --port, or 0 for any"
            ) from error
        raise NotUsableError(f"can't serve at {host}:{port}: {error.strerror}") from error


def startup_line(service: Service, listener: socket.socket, *, secure: bool = False) -> str:
    """Return the startup line.

    `serving NAME at http://127.0.0.1:8000 - tensors at /v2/models/NAME/infer, docs at /docs`
    """
    host, port = listener.getsockname()[:2]
    what = [f"tensors at /v2/models/{name}/infer" for name in service.engines][:1]
    if any(engine.predictor.task == "embedding" for engine in service.engines.values()):
        what.append("embeddings at /v1/embeddings")
    if service.generators:
        what.append("OpenAI clients at /v1")
    place = f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    return f"serving {', '.join(service.models)} at {place} - {', '.join(what)}, docs at /docs"
