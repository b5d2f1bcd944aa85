"""Request on the fast path, in place of uvicorn's request cycle."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ...errors import InferError
from ..batching.infer_result import InferResult, PendingResult
from ..http.body_memory import BodyMemory
from ..http.http_protocol import HttpProtocol
from ..http.request_context import RequestContext
from ..http.routing import CLIENT_GONE, Response, header_lines
from .header_cache import KnownHead

log = logging.getLogger("infer.serve")
CLOSE = (b"connection", b"close")


class Group(Protocol):
    """Owner of the queue item that a request is in."""

    def leave(self, request: FastRequest) -> None:
        """Cancel the request, whose client has disconnected."""

    def response(self, context: RequestContext, answer: InferResult) -> Response:
        """Make the response to one request. Raises `InferError` for outputs that can't be sent."""

    def end(self, count: int) -> None:
        """Note that `count` requests were answered or cancelled."""


class FastRequest(PendingResult):
    """Request with the attributes of uvicorn's cycle that a connection uses.

    These are `disconnected`, `keep_alive`, `message_event`, `response_started` and `response_complete`. `group`: None
    before it is queued and after it has ended.
    """

    __slots__ = (
        *("_bodies", "_context", "began", "body", "connection", "disconnected", "group", "held"),
        *("head", "keep_alive", "known", "numbers", "response_complete", "response_started"),
    )

    def __init__(
        self,
        connection: HttpProtocol,
        known: KnownHead,
        body: bytes,
        numbers: bytes,
        bodies: BodyMemory,
        head: bytes,
    ) -> None:
        super().__init__()
        self.began, self.connection, self.known = time.perf_counter(), connection, known
        self.head, self.body, self.numbers = head, body, numbers
        self.disconnected = self.response_complete = self.response_started = False
        self.keep_alive = True
        self.group: Group | None = None
        self._context: RequestContext | None = None
        self._bodies, self.held = bodies, len(body)
        bodies.held += self.held
        known.endpoint.service.active += 1

    @property
    def context(self) -> RequestContext:
        """Context of the request; made when an error, a log or a trace needs it."""
        context = self._context
        if context is None:
            known, client = self.known, self.connection.client
            context = self._context = RequestContext(
                known.endpoint.service,
                known.route,
                known.path,
                known.headers,
                known.endpoint.ids.next(),
                self.body,
                model=known.path["model"],
                method=known.route.method,
                client=client[0] if client else "",
            )
        return context

    @property
    def message_event(self) -> FastRequest:
        return self

    def set(self) -> None:
        """Cancel the request: uvicorn sets the event of its cycle after `disconnected`."""
        if not self.disconnected or self.response_complete or self.settled:
            return
        self.settled = True
        if self.group is not None:
            self.group.leave(self)
        self._end(CLIENT_GONE)

    def fall_back(self) -> None:
        """Answer the request on the ordinary path; it must not be queued."""
        if self.settled:
            return
        self.settled = True
        data = self.head + self.body
        self.release()
        self.connection.resume(data, keep_alive=self.keep_alive)

    def resolve(self, outcome: InferResult | Exception) -> None:
        endpoint, context = self.known.endpoint, self.context
        try:
            if isinstance(outcome, Exception):
                response = endpoint.failed(context, outcome)
            elif self.group is None:
                raise InferError("a request was answered that is in no group")
            else:
                response = self.group.response(context, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            response = endpoint.failed(context, error)
        try:
            self._send(response)
        except Exception:
            log.exception("a request could not be answered")
            self.connection.transport.close()
        self._end(response.status)

    def _end(self, status: int) -> None:
        group = self.group
        self.known.endpoint.count(self.context, status, self.began)
        self.release()
        if group is not None:
            group.end(1)

    def release(self) -> None:
        """Release all that the request holds.

        An idle connection keeps its last request, whose tracebacks and results refer to shared memory.
        """
        self._bodies.held -= self.held
        self.held = 0
        self.known.endpoint.service.active -= 1
        context, self._context = self._context, None
        if context is not None:
            context.error, context.measure, context.body = None, None, b""
        self.body = self.numbers = b""
        self.group = None

    def _send(self, response: Response) -> None:
        headers = [
            *self.connection.server_state.default_headers,
            *self.context.response_headers(response, over_limit=False),
        ]
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append(CLOSE)
        headers.append((b"content-length", b"%d" % len(response.body)))
        self.write(b"%b%b\r\n%b" % (STATUS_LINE[response.status], header_lines(headers), response.body))

    def write(self, answer: bytes) -> None:
        """Send the whole response; requests held back behind this one continue."""
        connection = self.connection
        self.response_started = self.response_complete = True
        connection.transport.write(answer)
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()
