"""Requests whose head came before, byte for byte: it is not parsed again, and the answer goes out in one write.

A client that keeps its connection repeats its head with every request, or once per length of body. When a known head
comes with its whole body in one read, the endpoint is called without ASGI in between; everything that a request may say
in its body is looked at as ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..errors import InferError
from .body import Share
from .heads import Known
from .routing import CLIENT_GONE, Call, Reply, head_lines
from .tickets import Answer, Ticket

if TYPE_CHECKING:
    from .party import Party
    from .wire import Wire

log = logging.getLogger("infer.serve")
CLOSE = (b"connection", b"close")


class Express(Ticket):
    """One such request under way; stands where uvicorn has its cycle, whose attributes it therefore has.

    It goes with others in a `party`, or alone, as a task. `held`: bytes of its body that are counted as in memory.
    """

    __slots__ = (
        *("_call", "began", "body", "disconnected", "held", "keep_alive", "known", "party"),
        *("response_complete", "response_started", "task", "wire"),
    )

    def __init__(self, wire: Wire, known: Known, body: bytes) -> None:
        self.began, self.wire, self.known, self.body = time.perf_counter(), wire, known, body
        self.settled = self.disconnected = self.response_complete = self.response_started = False
        self.keep_alive, self.held = True, 0
        self.task: asyncio.Task[None] | None = None
        self.party: Party | None = None
        self._call: Call | None = None
        endpoint = known.endpoint
        endpoint.service.active += 1
        if known.together is None or wire.over:
            self.alone()
        else:
            endpoint.convoy.join(self)

    @property
    def call(self) -> Call:
        """Made when somebody asks for it: of most requests nobody does."""
        call = self._call
        if call is None:
            client = self.wire.client
            call = self._call = self.known.endpoint.call(self.known, self.body, client[0] if client else "")
            if self.party is not None:
                call.model = self.party.engine.predictor.name
        return call

    @property
    def message_event(self) -> Express:
        """uvicorn sets its event when the client has gone, after `disconnected`: nobody waits for the answer then."""
        return self

    def set(self) -> None:
        if not self.disconnected or self.response_complete:
            return
        if self.task is not None:
            self.task.cancel()
        elif not self.settled:
            self.settled = True
            if self.party is not None:
                self.party.engine.leave(self)
            self._end(CLIENT_GONE)

    def alone(self) -> None:
        self._give_back()
        self._start(self._ask())

    def tell(self, outcome: Answer | Exception) -> None:
        """As one of a party, that is answered by itself."""
        endpoint, call = self.known.endpoint, self.call
        try:
            if isinstance(outcome, Exception):
                reply = endpoint.failed(call, outcome)
            elif self.party is None:
                raise InferError("a request was answered that went with no others")
            else:
                reply = self.party.reply(call, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            reply = endpoint.failed(call, error)
        if self.wire.flow.write_paused:
            self._start(self._answer(reply))
        else:
            try:
                self._send(reply)
            except Exception:
                log.exception("a request could not be answered")
                self.wire.transport.close()
            self._end(reply.status)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        wire = self.wire
        self.task = task = wire.loop.create_task(self._run(work))
        wire.tasks.add(task)
        task.add_done_callback(wire.tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            self._end(CLIENT_GONE)
            if not self.disconnected:  # the server ends, and this with it
                self.wire.transport.close()
                raise
        except Exception:
            log.exception("a request could not be answered")
            self.wire.transport.close()
            self._end(500)

    async def _ask(self) -> None:
        endpoint = self.known.endpoint
        share = Share(endpoint.bodies)
        try:
            await self._answer(await endpoint.direct(self.call, share, over=self.wire.over))
        finally:
            share.close()

    async def _answer(self, reply: Reply) -> None:
        if self.wire.flow.write_paused:
            await self.wire.flow.drain()
        if not self.disconnected:
            self._send(reply)
        self._end(reply.status)

    def _end(self, status: int) -> None:
        """Count it, and let go of all it holds."""
        party = self.party
        self.known.endpoint.count(self.call, status, self.began)
        self.release()
        if party is not None:
            party.end(1)

    def release(self) -> None:
        """A connection at rest has this as its last request: tracebacks refer back, answers are views of shared
        memory."""
        self._give_back()
        self.known.endpoint.service.active -= 1
        call, self._call = self._call, None
        if call is not None:
            call.error, call.measure, call.body = None, None, b""
        self.body, self.party = b"", None

    def _give_back(self) -> None:
        self.known.endpoint.bodies.held -= self.held
        self.held = 0

    def _send(self, reply: Reply) -> None:
        """The whole answer."""
        wire = self.wire
        headers = [*wire.server_state.default_headers, *reply.head(self.call, over=wire.over)]
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append(CLOSE)
        headers.append((b"content-length", b"%d" % len(reply.body)))
        self.write(b"%b%b\r\n%b" % (STATUS_LINE[reply.status], head_lines(headers), reply.body))

    def write(self, answer: bytes) -> None:
        """All of it; what was held back behind this request goes on."""
        wire = self.wire
        self.response_started = self.response_complete = True
        wire.transport.write(answer)
        if not self.keep_alive:
            wire.transport.close()
        wire.on_response_complete()
