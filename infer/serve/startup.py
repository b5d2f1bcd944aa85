"""Start of a server, as its operator sees it: the startup line, and reports of a start that takes long."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from .grpc import RpcListener
from .http.listener import address_of
from .service import Service
from .workers.opening_progress import REPORT_SECONDS, main_thread_place

log = logging.getLogger("infer.serve")


@contextlib.contextmanager
def slow_start_reports(seconds: float = REPORT_SECONDS) -> Iterator[Callable[[], None]]:
    """Log every so many seconds where a starting server is, until the exit or a call of the function yielded."""
    over, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not over.wait(seconds):
            spent = time.monotonic() - began
            log.warning("the server is not ready after %.0f s, in %s", spent, main_thread_place())

    thread = threading.Thread(target=report, name="infer-start", daemon=True)
    thread.start()
    try:
        yield over.set
    finally:
        over.set()


def print_line(line: str) -> None:
    """Print a line; neither a full disk behind stdout nor a full pipe that nobody reads stops the server."""
    try:
        _require_writable()
        print(line, flush=True)
    except OSError as error:
        log.warning("could not print: %s (%s)", line, error.strerror)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else its flush would fail again, at the end


def _require_writable() -> None:
    """Raise `BlockingIOError` where a short line would block."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # captured, or closed
        return
    if sys.platform != "win32":
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError(errno.EAGAIN, "nobody reads the pipe")


def startup_line(
    service: Service, listener: socket.socket, rpc: RpcListener | None = None, *, secure: bool = False
) -> str:
    """Return the line printed at startup: models, address and routes.

    `serving NAME at http://127.0.0.1:8000 - tensors at /v2/models/NAME/infer, docs at /docs`
    """
    what = [f"tensors at /v2/models/{name}/infer" for name in service.engines][:1]
    if any(engine.info.task == "embedding" for engine in service.engines.values()):
        what.append("embeddings at /v1/embeddings")
    if any(engine.info.task == "classification" and engine.takes_text for engine in service.engines.values()):
        what.append("labels and scores at /classify, /v1/rerank")
    if service.generators:
        what.append("OpenAI clients at /v1")
    if rpc is not None:
        what.append(f"gRPC at {address_of(rpc.socket)}")
    place = f"{'https' if secure else 'http'}://{address_of(listener)}"
    return f"serving {', '.join(service.models)} at {place} - {', '.join(what)}, docs at /docs"
