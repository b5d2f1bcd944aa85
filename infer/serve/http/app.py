"""ASGI application: dispatch, limits, request ids and errors of one route table, which the dialects fill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

from starlette.routing import Route as Address
from starlette.routing import Router

from ... import plugins
from ...errors import InferError, NotFoundError
from ..service import Service
from .body import (
    ClientGoneError,
    Receive,
    Send,
    cancel_on_disconnect,
    discard,
    read_body,
    send_stream,
)
from .body_memory import BodyMemory, BodyReservation
from .connection import ConnectionHandle
from .request_context import RequestContext
from .routing import (
    CLIENT_GONE,
    MethodError,
    Response,
    Route,
    TooManyConnectionsError,
    error_response,
    exception_summary,
    to_response,
)
from .trace_context import start_trace

log = logging.getLogger("infer.serve")
Scope = MutableMapping[str, Any]

FOLDER = "infer.serve.api"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
DISCONNECT_POLL_DELAY = 0.005  # seconds before a request of another ASGI server is checked for disconnect
MAX_JOINED_BYTES = 1 << 16  # of a response that is sent with its head in one write


def route_table(service: Service) -> list[Route]:
    """Return the routes of all dialects."""
    return [route for name in plugins.names(FOLDER) for route in plugins.get(FOLDER, name).routes(service)]


class App(Router):
    """Router of one service. `bodies`: count of the request bytes in memory."""

    def __init__(
        self, service: Service, bodies: BodyMemory, addresses: list[Address], default: Endpoint
    ) -> None:
        super().__init__(addresses, default=default, redirect_slashes=False)
        self.service, self.bodies = service, bodies


def build(service: Service) -> App:
    """Make the application: one endpoint for each path."""
    routes = route_table(service)
    service.routes = routes
    bodies = BodyMemory(service.limits.max_bodies_bytes)
    service.metrics.add_process_gauges(lambda: bodies.held)
    paths = dict.fromkeys(route.path for route in sorted(routes, key=lambda r: not r.work))
    addresses = [
        Address(path, Endpoint(service, bodies, {r.method: r for r in routes if r.path == path}))
        for path in paths
    ]
    return App(service, bodies, addresses, Endpoint(service, bodies, {}, routes))


class RequestIds:
    """Random request ids of 32 hexadecimal digits, generated in blocks: one `os.urandom` call each would cost 5 µs."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def next(self) -> str:
        if not self._left:
            block = os.urandom(16 * 256).hex()
            self._left = [block[at : at + 32] for at in range(0, len(block), 32)]
        return self._left.pop()


class Endpoint:
    """ASGI endpoint of all methods of one path; without methods, of unknown paths."""

    def __init__(
        self,
        service: Service,
        bodies: BodyMemory,
        methods: Mapping[str, Route],
        routes: list[Route] | None = None,
    ) -> None:
        self.service, self.bodies, self.methods = service, bodies, dict(methods)
        if "GET" in self.methods:
            self.methods.setdefault("HEAD", self.methods["GET"])
        self.routes = routes or list(self.methods.values())
        self.ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, service = time.perf_counter(), self.service
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if REQUEST_ID.fullmatch(given) else self.ids.next()
        route = self.methods.get(scope["method"])
        context = RequestContext(
            service,
            route or self._nearest(scope["path"]),
            scope.get("path_params", {}),
            headers,
            request_id,
            method=scope["method"],
            client=(scope.get("client") or ("",))[0],
            query=scope.get("query_string", b"").decode("latin-1"),
            known=route is not None,
            trace=start_trace(scope["headers"], always=service.traces)
            if b"traceparent" in headers or service.traces
            else None,
        )
        service.active += 1
        share = BodyReservation(self.bodies)
        try:
            state = scope.get("state", {})
            over_limit, connection = bool(state.get("over_limit")), state.get("connection")
            response = await self._answer(
                context, receive, share, known=route is not None, over_limit=over_limit, connection=connection
            )
            await _send(context, response, receive, send, over_limit=over_limit, connection=connection)
            self.count(context, response.status, began)
        except ClientGoneError:
            self.count(context, CLIENT_GONE, began)
        except asyncio.CancelledError:  # Ray cancels where uvicorn reports a disconnect
            self.count(context, CLIENT_GONE, began)
            raise
        finally:
            context.error = None  # its traceback refers to the context
            share.close()
            service.active -= 1

    async def _answer(
        self,
        context: RequestContext,
        receive: Receive,
        share: BodyReservation,
        *,
        known: bool,
        over_limit: bool = False,
        connection: ConnectionHandle | None = None,
    ) -> Response:
        try:
            self._admit(context, open=known and context.route.open, over_limit=over_limit)
            if not known:
                raise (
                    MethodError(sorted(self.methods))
                    if self.methods
                    else NotFoundError("no route has this path", hint="/docs lists the routes")
                )
            if context.route.work:
                context.timeout()
                self.service.require_ready()
            if context.route.method == "POST":
                precheck = (
                    None if context.route.precheck is None else partial(context.route.precheck, context)
                )
                context.body = await read_body(receive, context.headers, self.service.limits, share, precheck)
                context.began = time.monotonic()
                return to_response(
                    await cancel_on_disconnect(
                        context.route.handler(context), receive, DISCONNECT_POLL_DELAY, connection
                    ),
                    context.route,
                )
            return to_response(await context.route.handler(context), context.route)
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            return self.failed(context, error)

    def failed(self, context: RequestContext, error: Exception) -> Response:
        """Return the response to an error and keep the error in `context.error`, a cycle that the caller breaks."""
        if not isinstance(error, InferError):
            log.error("request %s failed: %s", context.request_id, exception_summary(error))
            error = InferError(
                f"internal error; the server's log has it under request id {context.request_id}"
            )
        context.error = error
        return error_response(error, context.route.error_format)

    def _admit(self, context: RequestContext, *, open: bool, over_limit: bool) -> None:
        if open:
            return
        if over_limit:
            raise TooManyConnectionsError("too many connections are open")
        context.require_key()

    def _nearest(self, path: str) -> Route:
        first = path.removeprefix("/").partition("/")[0]
        home = next((r for r in self.routes if r.path == "/"), self.routes[0])
        return next((r for r in self.routes if r.path.split("/")[1] == first), home)

    def count(self, context: RequestContext, status: int, began: float) -> None:
        name, version = self.labels(context.model)
        seconds = time.perf_counter() - began
        self.service.metrics.request(name, version, status, context.route.error_format.api, seconds)
        for observer in self.service.observers:
            observer.note(context, status, seconds, name, version)

    def labels(self, name: str) -> tuple[str, str]:
        """Return name and version of a model as metric labels; empty if it is not served any more."""
        model = self.service.models.get(name)
        return (name, model.info.version) if model else ("", "")


async def _send(
    context: RequestContext,
    response: Response,
    receive: Receive,
    send: Send,
    *,
    over_limit: bool,
    connection: ConnectionHandle | None = None,
) -> None:
    headers = context.response_headers(response, over_limit=over_limit)
    if response.stream is not None:
        await send_stream(response, headers, receive, send, connection)
        return
    headers.append((b"content-length", b"%d" % len(response.body)))
    joined = connection if len(response.body) <= MAX_JOINED_BYTES else None
    with joined.one_write() if joined is not None else contextlib.nullcontext():
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        unread = response.status in (413, 415) and not context.body
        await send({"type": "http.response.body", "body": response.body, "more_body": unread})
    if unread:
        await discard(receive, context.service.limits)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
