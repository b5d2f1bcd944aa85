"""Requests on the fast path, in place of uvicorn's request cycle, and groups of those that share a queue item."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ...errors import InferError
from ...spec import BATCH
from ..api.kserve.kserve_response import encode_response, encode_responses
from ..batching.infer_result import InferResult, PendingResult
from ..batching.queue_items import ItemOwner, QueueItem
from ..batching.tensor_engine import TensorEngine
from ..http.body import BodyMemory
from ..http.http_protocol import HttpProtocol
from ..http.request_context import RequestContext
from ..http.routing import CLIENT_GONE, Response, header_lines
from .body_cache import BodyTemplate
from .header_cache import KnownHead

log = logging.getLogger("infer.serve")
CLOSE = (b"connection", b"close")


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
        self.group: RequestGroup | None = None
        self._context: RequestContext | None = None
        self._bodies, self.held = bodies, len(body)
        bodies.held += self.held
        known.life.service.active += 1

    @property
    def context(self) -> RequestContext:
        """Context of the request; made when an error, a log or a trace needs it."""
        context = self._context
        if context is None:
            known, client = self.known, self.connection.client
            context = self._context = RequestContext(
                known.life.service,
                known.route,
                known.path,
                known.headers,
                known.life.ids.next(),
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
        life, context = self.known.life, self.context
        try:
            if isinstance(outcome, Exception):
                response = life.failed(context, outcome)
            elif self.group is None:
                raise InferError("a request was answered that is in no group")
            else:
                response = self.group.response(context, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            response = life.failed(context, error)
        try:
            self._send(response)
        except Exception:
            log.exception("a request could not be answered")
            self.connection.transport.close()
        self._end(response.status)

    def _end(self, status: int) -> None:
        group = self.group
        self.known.life.count(self.context, status, self.began)
        self.release()
        if group is not None:
            group.end(1)

    def release(self) -> None:
        """Release all that the request holds.

        An idle connection keeps its last request, whose tracebacks and results refer to shared memory.
        """
        self._bodies.held -= self.held
        self.held = 0
        self.known.life.service.active -= 1
        context, self._context = self._context, None
        if context is not None:
            context.error, context.measure, context.body = None, None, b""
        self.body = self.numbers = b""
        self.group = None

    def _send(self, response: Response) -> None:
        headers = [
            *self.connection.server_state.default_headers,
            *self.context.response_headers(response),
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


class Timer:
    """Deadline timer of requests that were queued together, in any number of batches."""

    def __init__(self, engine: TensorEngine, template: BodyTemplate, timeout: float, count: int) -> None:
        self.engine, self.template, self._left = engine, template, count
        self.groups: list[RequestGroup] = []
        self._alarm = asyncio.get_running_loop().call_later(timeout, self._expire)

    def end(self, count: int) -> None:
        """Note that `count` requests were answered or cancelled."""
        self._left -= count
        if not self._left:
            self._alarm.cancel()
            for group in self.groups:  # they refer back
                group.settled, group.items = True, []
            self.groups = []

    def _expire(self) -> None:
        for group in list(self.groups):
            self.engine.expire(group)


@dataclass(slots=True, eq=False)
class GroupItem(QueueItem):
    """Queue item of `requests` whole requests of equally many rows.

    `owner`: a `RequestGroup`, which has them in `requests`, in the order of the rows, and gives up the first of them by
    `split_off`.
    """

    def take(self, count: int) -> GroupItem:
        """Split off its first `count` requests, with an owner of their own."""
        taken = self._slice(0, count, None)
        taken.owner = self.owner.split_off(count, taken)
        self._become(self._slice(count, self.requests, None))
        return taken

    def drop(self, at: int) -> None:
        """Remove request number `at` of several."""
        each = self.rows // self.requests
        rest = self._slice(1, self.requests, None)
        gone = slice(at * each, (at + 1) * each)
        rest.inputs = {name: np.delete(array, gone, 0) for name, array in self.inputs.items()}
        self._become(rest)
        del self.owner.requests[at]

    def split(self) -> list[QueueItem]:
        """Return one item for each of its requests, each with its own owner."""
        if not isinstance(self.owner, RequestGroup):
            return [self]
        owners = self.owner.requests
        if len(owners) == 1:
            return [replace(self, owner=owners[0])]
        return [self._slice(at, at + 1, owner) for at, owner in enumerate(owners)]

    def _slice(self, start: int, stop: int, owner: ItemOwner | FastRequest | None) -> GroupItem:
        each, size, count = self.rows // self.requests, self.size_bytes // self.requests, stop - start
        return replace(
            self,
            inputs={name: array[start * each : stop * each] for name, array in self.inputs.items()},
            sizes={**self.sizes, BATCH: count * each},
            rows=count * each,
            size_bytes=count * size,
            requests=count,
            owner=owner,
        )

    def _become(self, other: GroupItem) -> None:
        self.inputs, self.sizes, self.rows = other.inputs, other.sizes, other.rows
        self.size_bytes, self.requests = other.size_bytes, other.requests


class RequestGroup(ItemOwner):
    """Coalesced requests of one queue item. `requests`: in the order of its rows, without cancelled ones."""

    __slots__ = ("_timer", "requests")

    def __init__(self, timer: Timer, requests: Sequence[FastRequest]) -> None:
        super().__init__()
        self._timer, self.requests = timer, list(requests)
        timer.groups.append(self)
        for request in requests:
            request.group = self

    @property
    def pending(self) -> int:
        return sum([not request.settled for request in self.requests])

    def split_off(self, count: int, item: QueueItem) -> RequestGroup:
        """Split off the first `count` requests, which own `item`."""
        first = self.requests[:count]
        del self.requests[:count]
        group = RequestGroup(self._timer, first)
        group.items = [item]
        return group

    def dissolve(self) -> None:
        """Undo the grouping of requests that were not queued."""
        for request in self.requests:
            request.group = None
        self.end(len(self.requests))

    def end(self, count: int) -> None:
        self._timer.end(count)

    def leave(self, request: FastRequest) -> None:
        """Cancel one request, and remove its rows if the item still waits."""
        engine = self._timer.engine
        # Not this one where a part was taken since.
        group = next(group for group in self._timer.groups if request in group.requests)
        queued = engine.queue.drop(group.items[0], group.requests.index(request))
        engine.metrics.cancelled("queued" if queued else "running")

    def response(self, context: RequestContext, answer: InferResult) -> Response:
        """Make the response to one request. Raises `InferError` for outputs that cannot be sent."""
        context.measure = answer.timings
        return encode_response(self._timer.engine, None, answer, self._timer.template.outputs)

    def resolve(self, outcome: InferResult | Exception) -> None:
        if isinstance(outcome, Exception):
            for request in self.requests:
                request.fail(outcome)
            return
        written = None
        try:
            written = self._write(outcome)
        except InferError:  # each request gets it below
            pass
        except Exception:
            log.exception("answers could not be written together")
        if written is None:
            for at, request in enumerate(self.requests):
                request.finish(0, slice_request(outcome, at, len(self.requests)))
        else:
            self._send(outcome, *written)
        self.requests = []

    def _write(self, answer: InferResult) -> tuple[bytes, bytes, list[bytes]] | None:
        """Return the common head before and after the request id, and the bodies; None to write each by itself."""
        first, timer = self.requests[0], self._timer
        service = first.known.life.service
        if service.traces or service.state != "ready":
            return None
        written = encode_responses(timer.engine, answer, timer.template.outputs, len(self.requests))
        if written is None:
            return None
        media, headers, bodies = written
        lines = (*first.connection.server_state.default_headers, (b"content-type", media.encode()))
        before = b"%b%bx-request-id: " % (STATUS_LINE[200], header_lines(lines))
        return before, b"\r\n%bcontent-length: " % header_lines(headers), bodies

    def _send(self, answer: InferResult, before: bytes, after: bytes, bodies: list[bytes]) -> None:
        """Answer all requests that are not cancelled; their times end with the last write."""
        first, name = self.requests[0].known, self._timer.engine.info.name
        life, answered = first.life, list[FastRequest]()
        observers = life.service.observers
        for at, (request, body) in enumerate(zip(self.requests, bodies, strict=True)):
            if request.settled:
                continue
            if not request.keep_alive:
                request.finish(0, slice_request(answer, at, len(bodies)))
                continue
            request.settled = True
            answered.append(request)
            id = request.context.request_id if observers else life.ids.next()
            try:
                request.write(b"%b%b%b%d\r\n\r\n%b" % (before, id.encode(), after, len(body), body))
            except Exception:
                log.exception("a request could not be answered")
                request.connection.transport.close()
        if not answered:
            return
        now, labels = time.perf_counter(), life.labels(name)
        seconds = [now - request.began for request in answered]
        life.service.metrics.request(*labels, 200, first.route.error_format.api, *seconds)
        for observer in observers:
            for request, spent in zip(answered, seconds, strict=True):
                request.context.measure = answer.timings
                observer.note(request.context, 200, spent, *labels)
        for request in answered:
            request.release()
        self.end(len(answered))


def slice_request(answer: InferResult, at: int, count: int) -> InferResult:
    """Return the result of request `at` of `count` whose rows follow each other, equally many of each."""
    if count == 1:
        return answer
    outputs = {}
    for name, array in answer.outputs.items():
        each = len(array) // count
        outputs[name] = array[at * each : (at + 1) * each]
    return replace(answer, outputs=outputs)
