"""Coalescing: requests of one template that arrive in one iteration of the event loop become one queue item."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from ...errors import InferError
from ...spec import BATCH
from ..api.kserve.kserve_request import read_tensors
from ..batching.tensor_engine import TensorEngine
from ..http.app import App
from ..http.http_protocol import HttpProtocol
from ..http.request_context import RequestContext
from .body_cache import BodyCache, BodyTemplate
from .fast_request import FastRequest, GroupItem, RequestGroup, Timer
from .header_cache import HeaderCache, KnownHead

log = logging.getLogger("infer.serve")
# Requests that may share a queue item have all of it in common; the last are seconds and tenant.
Kind = tuple[TensorEngine, BodyTemplate, float, str]


class Coalescer:
    """Fast path of one server; see `http_protocol.FastPath`. Runs on the event loop only."""

    start = b"POST /v2/"

    def __init__(self, app: App) -> None:
        self._service, self._bodies = app.life.service, app.life.bodies
        self._heads = HeaderCache(app)
        self._templates: WeakKeyDictionary[TensorEngine, BodyCache] = WeakKeyDictionary()
        self._arrived: dict[Kind, list[FastRequest]] = {}

    def learn(self, connection: HttpProtocol, head: bytes, length: int) -> None:
        self._heads.learn(head, connection, length)

    def take(self, connection: HttpProtocol, head: bytes, data: bytes, start: int) -> int:
        found_head = self._heads.find(head)
        if found_head is None:
            return 0
        known, length = found_head
        end, service = start + length, self._service
        if len(data) < end or service.state != "ready" or service.traces:
            return 0
        if connection.over_limit or connection.flow.write_paused:
            return 0
        engine = service.models.get(known.path["model"])
        if (
            not isinstance(engine, TensorEngine)
            or known.path.get("version", engine.info.version) != engine.info.version
        ):
            return 0
        body = data[start:end]
        if self._bodies.held + length > self._bodies.limit:
            return 0
        templates = self._templates.get(engine)
        if templates is None:
            templates = self._templates[engine] = BodyCache(engine.collator)
        found = templates.find(body, known.split)
        if found is None:
            self._study(known, engine, templates, body)
            return 0
        template, numbers = found
        request = FastRequest(connection, known, body, numbers, self._bodies, head)
        connection.cycle = request  # type: ignore[assignment]
        if not self._arrived:
            connection.loop.call_soon(self._flush)
        kind = engine, template, min(template.timeout, known.timeout), known.tenant
        self._arrived.setdefault(kind, []).append(request)
        return end

    def _study(self, known: KnownHead, engine: TensorEngine, templates: BodyCache, body: bytes) -> None:
        """Learn the template of a body; after `MAX_STUDIES` bodies of a head no more are tried."""
        if not known.studies or len(body) > engine.limits.max_json_bytes:
            return
        known.studies -= 1
        context = RequestContext(self._service, known.route, known.path, known.headers, "", body)
        try:
            tensors = read_tensors(context, engine)
            if tensors is not None:
                templates.learn(body, *tensors)
        except InferError:  # the ordinary path answers it
            return

    def _flush(self) -> None:
        """Queue the requests of this loop iteration; those that cannot be coalesced take the ordinary path."""
        arrived, self._arrived = self._arrived, {}
        for (engine, template, timeout, tenant), requests in arrived.items():
            waiting = [request for request in requests if not request.settled]
            most = max(engine.queue.max_batch // template.rows, 1)
            for at in range(0, len(waiting), most):
                some = waiting[at : at + most]
                try:
                    queued = _queue(engine, template, some, timeout, tenant)
                except Exception:
                    log.exception("requests could not be queued together")
                    queued = False
                if not queued:
                    for request in some:
                        request.fall_back()


def _queue(
    engine: TensorEngine,
    template: BodyTemplate,
    requests: Sequence[FastRequest],
    timeout: float,
    tenant: str,
) -> bool:
    """Queue all requests as one item; return False if numbers do not fit, or not all would be admitted."""
    arrays = template.read([request.numbers for request in requests])
    if arrays is None:
        return False
    piece = template.piece
    rows = piece.rows
    count = len(requests)
    timer = Timer(engine, template, timeout, count)
    group = RequestGroup(timer, requests)
    item = GroupItem(
        inputs=arrays,
        sizes={**piece.sizes, BATCH: rows * count} if engine.collator.batched else piece.sizes,
        key=piece.key,
        rows=rows * count,
        elements=piece.elements,
        size_bytes=piece.size_bytes * count,
        row_work=engine.collator.row_work(arrays),
        deadline=engine.clock() + timeout,
        priority=template.priority,
        owner=group,
        index=0,
        requests=count,
        tenant=tenant,
    )
    group.items = [item]
    queued = False
    try:
        queued = engine.submit_group(item)
    finally:
        if not queued:
            group.dissolve()
    return queued
