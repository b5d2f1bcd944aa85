"""Beginning and end of every request, over HTTP and gRPC alike: its id, trace and key, its errors and counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping

from ...errors import InferError, NotReadyError
from ..service import Service
from .body import BodyMemory, BodyReservation, ClientGoneError
from .connection import ConnectionHandle
from .request_context import RequestContext
from .routing import (
    CLIENT_GONE,
    Response,
    Route,
    TooManyConnectionsError,
    error_response,
    exception_summary,
)
from .trace_context import start_trace

log = logging.getLogger("infer.serve")
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


class RequestIds:
    """Random request ids of 32 hexadecimal digits, generated in blocks: one `os.urandom` call each would cost 5 µs."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def next(self) -> str:
        if not self._left:
            block = os.urandom(16 * 256).hex()
            self._left = [block[at : at + 32] for at in range(0, len(block), 32)]
        return self._left.pop()


class RequestLife:
    """Requests of one server from their heads to their counts. `bodies`: count of the request bytes in memory."""

    def __init__(self, service: Service, bodies: BodyMemory) -> None:
        self.service, self.bodies = service, bodies
        self.ids = RequestIds()

    def begin(
        self,
        route: Route,
        path: Mapping[str, str],
        lines: Collection[tuple[bytes, bytes]],
        *,
        method: str,
        client: str,
        query: str = "",
        known: bool = True,
        connection: ConnectionHandle | None = None,
        over_limit: bool = False,
    ) -> RequestContext:
        """Return the context of a request, with the id and the trace that its header lines name, or new ones.

        `known`: the path supports the method; the others are as in `RequestContext`.
        """
        service, headers = self.service, dict(lines)
        asked = headers.get(b"x-request-id", b"")
        traced = service.traces or b"traceparent" in headers
        return RequestContext(
            service,
            route,
            path,
            headers,
            asked.decode() if REQUEST_ID.fullmatch(asked) else self.ids.next(),
            method=method,
            client=client,
            query=query,
            known=known,
            connection=connection,
            over_limit=over_limit,
            trace=start_trace(lines, always=service.traces) if traced else None,
        )

    @contextlib.contextmanager
    def running(self, context: RequestContext, began: float) -> Iterator[BodyReservation]:
        """Count a request as active; yield what reserves the memory of its body.

        A client that disconnects ends the block, and is counted. `began`: by `time.perf_counter`.
        """
        self.service.active += 1
        share = BodyReservation(self.bodies)
        try:
            yield share
        except ClientGoneError:
            self.count(context, CLIENT_GONE, began)
        except asyncio.CancelledError:  # Ray and gRPC cancel where uvicorn reports a disconnect
            self.count(context, CLIENT_GONE, began)
            raise
        finally:
            context.error = None  # its traceback refers to the context
            share.close()
            self.service.active -= 1

    def admit(self, context: RequestContext) -> None:
        """Raise unless the request may go on: `TooManyConnectionsError`, `UnauthorizedError`; for work also
        `DeadlineError` and `NotReadyError`.
        """
        if not (context.known and context.route.open):
            if context.over_limit:
                raise TooManyConnectionsError("too many connections are open")
            context.require_key()
        if context.known and context.route.work:
            context.timeout()
            if (state := self.service.state) != "ready":
                raise NotReadyError(f"the server is {'starting' if state == 'starting' else 'stopping'}")

    def failed(self, context: RequestContext, error: Exception) -> Response:
        """Return the response to an error and keep the error in `context.error`, a cycle that the caller breaks."""
        if not isinstance(error, InferError):
            log.error("request %s failed: %s", context.request_id, exception_summary(error))
            error = InferError(
                f"internal error; the server's log has it under request id {context.request_id}"
            )
        context.error = error
        return error_response(error, context.route.error_format)

    def count(self, context: RequestContext, status: int, began: float) -> None:
        """Record an answered request in metrics and logs. `began`: by `time.perf_counter`."""
        name, version = self.labels(context.model)
        seconds = time.perf_counter() - began
        self.service.metrics.request(name, version, status, context.route.error_format.api, seconds)
        for observer in self.service.observers:
            observer.note(context, status, seconds, name, version)

    def labels(self, name: str) -> tuple[str, str]:
        """Return name and version of a model as metric labels; empty if it is not served any more."""
        model = self.service.models.get(name)
        return (name, model.info.version) if model else ("", "")
