"""KServe requests that differ in their numbers alone, as one on their way through the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..errors import InferError
from .engine import Engine
from .entries import Entry
from .forms import Form
from .outputs import write, write_each
from .routing import Call, Reply, head_lines
from .tickets import Answer, Queued

if TYPE_CHECKING:
    from .express import Express

log = logging.getLogger("infer.serve")


class Group:
    """Requests that began together, with one alarm for all, however many batches they run in."""

    def __init__(self, engine: Engine, form: Form, requests: Sequence[Express], timeout: float) -> None:
        self.engine, self.form, self.left = engine, form, len(requests)
        self.parties = [Party(self, requests)]
        self._alarm = asyncio.get_running_loop().call_later(timeout, self._expire)

    def end(self, count: int) -> None:
        """So many of them have their answer, or are gone."""
        self.left -= count
        if not self.left:
            self._alarm.cancel()
            for party in self.parties:  # they refer back
                party.settled, party.entries = True, []
            self.parties = []

    def dissolve(self) -> None:
        """They go alone instead."""
        for request in self.parties[0].requests:
            request.party = None
        self.end(self.left)

    def _expire(self) -> None:
        for party in list(self.parties):
            self.engine.expire(party)


class Party(Queued):
    """Those of a group that are in one entry, in the order of its rows; who leaves while they wait is no more in it."""

    __slots__ = ("_group", "requests")

    def __init__(self, group: Group, requests: Sequence[Express]) -> None:
        super().__init__()
        self._group, self.requests = group, list(requests)
        for request in requests:
            request.party = self

    @property
    def engine(self) -> Engine:
        return self._group.engine

    @property
    def pending(self) -> int:
        return sum([not request.settled for request in self.requests])

    def part(self, count: int, entry: Entry) -> Party:
        """Its first `count`, who run now, in `entry`. Any thread that holds the engine's lock."""
        party = Party(self._group, self.requests[:count])
        party.entries = [entry]
        del self.requests[:count]
        self._group.parties.append(party)
        return party

    def end(self, count: int) -> None:
        self._group.end(count)

    def reply(self, call: Call, answer: Answer) -> Reply:
        """To one of them. Raises `InferError` for outputs that can't be sent."""
        call.measure = answer.took
        return write(self.engine, None, answer, self._group.form.wanted)

    def tell(self, outcome: Answer | Exception) -> None:
        if isinstance(outcome, Exception):
            for request in self.requests:
                request.fail(outcome)
            return
        written = None
        try:
            written = self._write(outcome)
        except InferError:  # each is told
            pass
        except Exception:
            log.exception("answers could not be written together")
        if written is None:
            for at, request in enumerate(self.requests):
                request.finish(0, outcome.part(at, len(self.requests)))
        else:
            self._send(outcome, *written)
        self.requests = []

    def _write(self, answer: Answer) -> tuple[bytes, bytes, list[bytes]] | None:
        """What stands before and behind the id in the head of all, and the bodies; None where each is to be written
        for itself."""
        first = self.requests[0]
        service = first.known.endpoint.service
        if service.traces or service.state != "ready":
            return None
        written = write_each(self.engine, answer, self._group.form.wanted, len(self.requests))
        if written is None:
            return None
        media, headers, bodies = written
        lines = (*first.wire.server_state.default_headers, (b"content-type", media.encode()))
        before = b"%b%bx-request-id: " % (STATUS_LINE[200], head_lines(lines))
        return before, b"\r\n%bcontent-length: " % head_lines(headers), bodies

    def _send(self, answer: Answer, before: bytes, behind: bytes, bodies: list[bytes]) -> None:
        """The answers of all who still want one."""
        endpoint = self.requests[0].known.endpoint
        answered: list[Express] = []
        observers = endpoint.service.observers
        for at, (request, body) in enumerate(zip(self.requests, bodies, strict=True)):
            if request.settled:
                continue
            if request.wire.flow.write_paused or not request.keep_alive:
                request.finish(0, answer.part(at, len(bodies)))
                continue
            request.settled = True
            answered.append(request)
            id = request.call.request_id if observers else endpoint.ids.next()
            try:
                request.write(b"%b%b%b%d\r\n\r\n%b" % (before, id.encode(), behind, len(body), body))
            except Exception:
                log.exception("a request could not be answered")
                request.wire.transport.close()
        if answered:
            endpoint.count_all(answered, self.engine.predictor.name, answer.took)
            for request in answered:
                request.release()
            self.end(len(answered))
