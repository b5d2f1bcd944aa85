"""Requests with known heads that come in one turn of the event loop go together as far as they are alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ServeError
from .routing import Together

if TYPE_CHECKING:
    from .body import Bodies
    from .express import Express
    from .service import Service

log = logging.getLogger("infer.serve")


class Convoy:
    """Those that came in this turn, and have a body in `bodies`."""

    def __init__(self, service: Service, bodies: Bodies) -> None:
        self._service, self._bodies = service, bodies
        self._waiting: list[Express] = []

    def join(self, request: Express) -> None:
        if not self._waiting:
            request.wire.loop.call_soon(self._go)
        self._waiting.append(request)

    def _go(self) -> None:
        came, self._waiting = self._waiting, []
        try:
            self._service.require_ready()
        except ServeError:  # which they are told on the other way
            self._alone(came)
            return
        groups: dict[Together | None, list[Express]] = {}
        for request in came:
            if request.settled:
                continue
            together, size = request.known.together, request.known.length
            if self._bodies.held + size > self._bodies.limit:
                together = None
            else:
                self._bodies.held += size
                request.held = size
            groups.setdefault(together, []).append(request)
        self._alone(groups.pop(None, []))
        for together, requests in groups.items():
            try:
                self._alone(together(self._service, requests))  # type: ignore[misc]
            except Exception:
                log.exception("requests could not go together")
                self._alone([request for request in requests if request.party is None])

    def _alone(self, requests: Sequence[Express]) -> None:
        for request in requests:
            if not request.settled:
                request.alone()
