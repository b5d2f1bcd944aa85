"""ASGI application: dispatch and answers of one route table, which the dialects fill."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from starlette.routing import Route as Address
from starlette.routing import Router

from ... import plugins
from ...errors import NotFoundError
from ..service import Service
from .body import (
    BodyMemory,
    BodyReservation,
    ClientGoneError,
    Receive,
    Send,
    cancel_on_disconnect,
    discard,
    read_body,
    send_stream,
)
from .request_context import RequestContext
from .request_life import RequestLife
from .routing import MethodError, Response, Route, to_response

Scope = MutableMapping[str, Any]

FOLDER = "infer.serve.api"
DISCONNECT_POLL_DELAY = 0.005  # seconds before a request of another ASGI server is checked for disconnect
MAX_JOINED_BYTES = 1 << 16  # of a response that is sent with its head in one write


def route_table(service: Service) -> list[Route]:
    """Return the routes of all dialects."""
    return [route for name in plugins.names(FOLDER) for route in plugins.get(FOLDER, name).routes(service)]


class App(Router):
    """Router of the requests of one server."""

    def __init__(self, life: RequestLife, addresses: list[Address], default: Endpoint) -> None:
        super().__init__(addresses, default=default, redirect_slashes=False)
        self.life = life


def build(service: Service, more: Sequence[Route] = ()) -> App:
    """Make the application: one endpoint for each path. `more`: routes beside those of the dialects."""
    routes = [*route_table(service), *more]
    service.routes = routes
    bodies = BodyMemory(service.limits.max_bodies_bytes)
    service.metrics.add_process_gauges(lambda: bodies.held)
    life = RequestLife(service, bodies)
    paths = dict.fromkeys(route.path for route in sorted(routes, key=lambda r: not r.work))
    addresses = [
        Address(path, Endpoint(life, {r.method: r for r in routes if r.path == path})) for path in paths
    ]
    return App(life, addresses, Endpoint(life, {}, routes))


class Endpoint:
    """ASGI endpoint of all methods of one path; without methods, of unknown paths."""

    def __init__(
        self, life: RequestLife, methods: Mapping[str, Route], routes: list[Route] | None = None
    ) -> None:
        self.life, self.methods = life, dict(methods)
        if "GET" in self.methods:
            self.methods.setdefault("HEAD", self.methods["GET"])
        self.routes = routes or list(self.methods.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, life = time.perf_counter(), self.life
        route, state = self.methods.get(scope["method"]), scope.get("state", {})
        context = life.begin(
            route or self._nearest(scope["path"]),
            scope.get("path_params", {}),
            scope["headers"],
            method=scope["method"],
            client=(scope.get("client") or ("",))[0],
            query=scope.get("query_string", b"").decode("latin-1"),
            known=route is not None,
            connection=state.get("connection"),
            over_limit=bool(state.get("over_limit")),
        )
        with life.running(context, began) as share:
            response = await self._answer(context, receive, share)
            await _send(context, response, receive, send)
            life.count(context, response.status, began)

    async def _answer(self, context: RequestContext, receive: Receive, share: BodyReservation) -> Response:
        route = context.route
        try:
            self.life.admit(context)
            if not context.known:
                raise (
                    MethodError(sorted(self.methods))
                    if self.methods
                    else NotFoundError("no route has this path", hint="/docs lists the routes")
                )
            if route.method != "POST":
                return to_response(await route.handler(context), route)
            precheck = None if route.precheck is None else partial(route.precheck, context)
            context.body = await read_body(
                receive, context.headers, self.life.service.limits, share, precheck
            )
            context.began = time.monotonic()
            work = cancel_on_disconnect(
                route.handler(context), receive, DISCONNECT_POLL_DELAY, context.connection
            )
            return to_response(await work, route)
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            return self.life.failed(context, error)

    def _nearest(self, path: str) -> Route:
        """Return what answers for a path that no route has: a route of the dialect with most of them beside it."""
        first = path.removeprefix("/").partition("/")[0]
        beside = [r for r in self.routes if r.path.split("/")[1] == first]
        beside = beside or [next((r for r in self.routes if r.path == "/"), self.routes[0])]
        dialects = Counter(route.error_format for route in beside)
        return max(beside, key=lambda route: dialects[route.error_format])


async def _send(context: RequestContext, response: Response, receive: Receive, send: Send) -> None:
    headers, connection = context.response_headers(response), context.connection
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
