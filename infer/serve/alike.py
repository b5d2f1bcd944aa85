"""KServe requests that came in one turn of the loop and differ in their numbers alone: read and queued together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import forms
from .engine import Engine
from .forms import Form
from .infer_v2 import SPLIT, write
from .routing import Reply
from .tickets import Answer

if TYPE_CHECKING:
    from .express import Express
    from .service import Service


class Group:
    """Some of them on their way through the engine, with one alarm for all."""

    def __init__(self, engine: Engine, form: Form, requests: Sequence[Express], timeout: float) -> None:
        self._engine, self._form = engine, form
        self._under_way = set(requests)
        self._alarm = asyncio.get_running_loop().call_later(timeout, self._expire)

    def reply(self, request: Express, answer: Answer) -> Reply:
        """Raises `InferError` for outputs that can't be sent."""
        request.call.measure = answer.took
        return write(self._engine, None, answer, self._form.wanted)

    def withdraw(self, request: Express) -> None:
        """Its client has gone."""
        self._engine.withdraw(request)

    def end(self, request: Express) -> None:
        self._under_way.discard(request)
        if not self._under_way:
            self._alarm.cancel()

    def _expire(self) -> None:
        for request in list(self._under_way):
            self._engine.expire(request)


def together(service: Service, requests: Sequence[Express]) -> list[Express]:
    """Begin those that can be; the rest is to go alone, and is told there what is wrong with it."""
    alone: list[Express] = []
    groups: dict[tuple[Engine, Form, float], list[tuple[Express, bytes]]] = {}
    for request in requests:
        call = request.call
        engine = service.engines.get(call.path["model"])
        if engine is None or call.path.get("version", engine.predictor.version) != engine.predictor.version:
            alone.append(request)
            continue
        call.model = engine.predictor.name
        found = forms.find(call.body, call.headers.get(SPLIT), engine.forms, engine.limits.max_json_bytes)
        if found is None:
            alone.append(request)
            continue
        form, numbers = found
        timeout = min(form.timeout, request.known.timeout)
        groups.setdefault((engine, form, timeout), []).append((request, numbers))
    for (engine, form, timeout), members in groups.items():
        most = max(engine.batcher.max_batch // form.rows, 1)
        for at in range(0, len(members), most):
            some = [request for request, _ in members[at : at + most]]
            parts = forms.read(form, [numbers for _, numbers in members[at : at + most]])
            if parts is None or not engine.enter(some, parts, form, timeout):
                alone += some
                continue
            group = Group(engine, form, some, timeout)
            for request in some:
                request.group = group
    return alone
