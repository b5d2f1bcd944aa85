"""Requests for text that a worker has, or is about to get; and who is tried alone after a worker died."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from typing import Any

import msgspec

from ...errors import InferError, InputError, PoisonError, WorkerDiedError
from ...llm.engine.engine_thread import Deliver
from ...llm.engine.requests import Output, Request
from .quarantine import Quarantine

log = logging.getLogger("infer.serve")


class Refusal(Output, frozen=True, kw_only=True):
    """The end of all completions of a request, for a reason with a class of its own."""

    error: Any


class Again(Output, frozen=True, kw_only=True):
    """What came of this request is void: it begins anew."""


class _Ticket:
    def __init__(self, request: Request, deliver: Deliver, replay: bool) -> None:
        self.request, self.deliver, self.replay = request, deliver, replay
        self.deaths = 0
        self.reset()

    def reset(self) -> None:
        self.started, self.unfinished = False, set(range(self.request.sampling.n))
        self.written = False  # the process may have read it


class Table:
    """Any thread. After a death, those of whom nobody has seen a token are tried again one at a time, each until it has
    one, while others wait. Who is there at a second death, with others, is tried until its end. Guilty is who was there
    at two deaths, alone at the last.
    """

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self._cut = Quarantine()  # streams that were alone at one death, and can't be tried again
        self._lock = threading.RLock()
        self._sent: dict[str, _Ticket] = {}
        self._waiting: dict[str, _Ticket] = {}
        self._suspects: deque[_Ticket] = deque()
        self._tried: str | None = None
        self.epoch = 0  # of the process that the requests sent now are for
        self._open = True  # that process can be sent requests
        self._over: InferError | None = None

    @property
    def busy(self) -> bool:
        """The worker has something to do."""
        return bool(self._sent)

    def add(self, request: Request, deliver: Deliver, *, replay: bool = False) -> None:
        """`replay`: nobody looks at its outputs before the last, so that it may begin `Again`.

        Raises `PoisonError`, or `InputError` for an id that is there.
        """
        if len(self.quarantine):
            self.quarantine.refuse(digest_of(request))
        with self._lock:
            if self._over is not None:
                raise self._over
            if request.id in self._sent or request.id in self._waiting:
                raise InputError(f"a request named {request.id!r} is running", where="id")
            self._waiting[request.id] = _Ticket(request, deliver, replay)

    def next(self) -> list[Request]:
        """What the worker may get now; it counts as written."""
        epoch, requests = self.take()
        for request in requests:
            self.wrote(request.id, epoch)
        return requests

    def take(self) -> tuple[int, list[Request]]:
        """What the worker may get now, and the epoch that this is for: at its end all that is left begins anew."""
        with self._lock:
            return self.epoch, self._take() if self._open else []

    def wrote(self, id: str, epoch: int) -> None:
        """The process of this epoch was sent the request: from now on it may be what ends it."""
        with self._lock:
            if epoch == self.epoch and (ticket := self._sent.get(id)) is not None:
                ticket.written = True

    def _take(self) -> list[Request]:
        with self._lock:
            if self._tried is not None:
                return []
            if self._suspects:
                chosen = [self._suspects.popleft()]
                self._tried = chosen[0].request.id
            else:
                chosen = list(self._waiting.values())
                self._waiting.clear()
            self._sent |= {ticket.request.id: ticket for ticket in chosen}
            return [ticket.request for ticket in chosen]

    def drop(self, id: str) -> bool:
        """Whether the worker has it. It is forgotten."""
        with self._lock:
            self._waiting.pop(id, None)
            self._suspects = deque(ticket for ticket in self._suspects if ticket.request.id != id)
            self._tried = None if self._tried == id else self._tried
            return self._sent.pop(id, None) is not None

    def deliver(self, outputs: list[Output]) -> bool:
        """Hand them on, one call for each receiver; whether `next` may have more now."""
        letters: dict[Deliver, list[Output]] = {}
        with self._lock:
            for output in outputs:
                ticket = self._sent.get(output.id)
                if ticket is None:
                    continue
                ticket.started = True
                letters.setdefault(ticket.deliver, []).append(output)
                if output.finish is not None:
                    ticket.unfinished.discard(output.index)
                    if not ticket.unfinished:
                        del self._sent[output.id]
                if self._tried == output.id and (ticket.deaths < 2 or not ticket.unfinished):
                    self._tried = None
            more = self._tried is None and bool(self._suspects or self._waiting)
        for deliver, own in letters.items():
            _hand(deliver, own)
        return more

    def refuse(self, id: str, error: InferError) -> None:
        with self._lock:
            ticket = self._sent.pop(id, None)
            self._tried = None if self._tried == id else self._tried
        if ticket is not None:
            _tell(ticket, error)

    def died(self) -> int:
        """The worker did: those it had are tried again, refused, or, once they had a token, failed. If one of them was
        found guilty, the number of deaths it is guilty of, else 0."""
        with self._lock:
            self.epoch += 1
            self._open = False
            sent, self._sent = list(self._sent.values()), {}
            tried, self._tried = self._tried, None
            unread = [ticket for ticket in sent if not ticket.written]
            sent = [ticket for ticket in sent if ticket.written]
            self._suspects.extendleft(ticket for ticket in unread if ticket.deaths)
            first = {ticket.request.id: ticket for ticket in unread if not ticket.deaths}
            self._waiting = first | self._waiting
        guilty = 0
        for ticket in sent:
            ticket.deaths += 1
            if ticket.started and not ticket.replay:
                guilty = 2 * (len(sent) == 1 and self._again(digest_of(ticket.request)))
                _tell(ticket, WorkerDiedError("the model's process died"))
            elif ticket.deaths > 1 and (len(sent) == 1 or ticket.request.id == tried):
                guilty = ticket.deaths
                self.quarantine.add(digest_of(ticket.request))
                _tell(ticket, PoisonError("the model's process died of this request, twice"))
            else:
                if ticket.started:
                    _hand(ticket.deliver, [Again(id=ticket.request.id, index=0)])
                ticket.reset()
                with self._lock:
                    self._suspects.append(ticket)
        return guilty

    def reopen(self) -> None:
        """Another process is there."""
        with self._lock:
            self._open = True

    def _again(self, digest: bytes) -> bool:
        """Whether a stream like this was alone at a death for the second time; it is refused from now on."""
        if digest not in self._cut:
            self._cut.add(digest)
            return False
        self.quarantine.add(digest)
        return True

    def end(self, error: InferError) -> None:
        """Fail all of them, and who comes later."""
        with self._lock:
            self.epoch += 1
            self._open, self._over = False, error
            tickets = [*self._sent.values(), *self._suspects, *self._waiting.values()]
            self._sent, self._waiting = {}, {}
            self._suspects.clear()
        for ticket in tickets:
            _tell(ticket, error)


def digest_of(request: Request) -> bytes:
    """Of everything but its id and whose it is."""
    content = msgspec.structs.replace(request, id="", tenant="", salt="")
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


def _tell(ticket: _Ticket, error: InferError) -> None:
    _hand(ticket.deliver, [Refusal(id=ticket.request.id, index=0, finish="error", error=error)])


def _hand(deliver: Deliver, outputs: list[Output]) -> None:
    try:
        deliver(outputs)
    except Exception:
        log.exception("outputs could not be delivered")
