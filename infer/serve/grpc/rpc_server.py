"""KServe v2 over gRPC, on a port of its own: each method is the handler of the REST route, behind other messages.

Ids, keys, deadlines, limits, metrics, logs and errors are those of HTTP: see `RequestLife`. Metadata takes the place of
headers, the call's deadline that of X-Request-Timeout-Ms.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError

# Processes are started anew, never forked with gRPC in them: its handlers would complain at each.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc  # noqa: E402

from ...errors import (
    BusyError,
    InferError,
    InputError,
    NotFoundError,
    NotReadyError,
    NotUsableError,
    TooLargeError,
)
from ..api import kserve
from ..api.kserve import kserve_request
from ..api.kserve.kserve_repository import Repository
from ..api.kserve.kserve_types import ErrorText
from ..http.body import BodyReservation
from ..http.listener import address_of
from ..http.request_context import RequestContext
from ..http.request_life import RequestLife
from ..http.routing import ErrorFormat, Handler, Response, Route, SlowBodyError, error_text
from ..limits import ServeLimits
from .schema import message_classes
from .tensors import fill_response, read_request

SERVICE = "inference.GRPCInferenceService"
PROTO = Path(__file__).with_name("kserve.proto")
MOST_STREAMED = 64  # requests of one stream that run at a time
LINGER = 1.0  # seconds for answers that are being sent at the end
ERROR_FORMAT = ErrorFormat("kserve_grpc", lambda error, _: ErrorText(error_text(error)), ErrorText)
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Rpc(NamedTuple):
    """A method by the REST handler that answers it.

    `field`: of the response that holds what the handler returns, if that is not the response itself; `health`: the
    answer to an error is a response whose flag is false.
    """

    handler: Handler
    field: str = ""
    open: bool = False
    health: bool = False


async def _statistics(context: RequestContext) -> Any:
    return await (kserve.stats if context.path["model"] else kserve.all_stats)(context)


def _refusal(reason: str, hint: str) -> Rpc:
    async def refuse(context: RequestContext) -> Any:
        raise NotUsableError(reason, hint=hint)

    return Rpc(refuse)


def rpcs(changes: Repository | None) -> dict[str, Rpc]:
    """Return the methods but those that infer, by name. `changes`: load and unload models, if clients may."""
    if changes is None:
        closed = _refusal("clients may not change the models of this server", "Start it with --allow-reload")
        repository = dict.fromkeys(("Index", "ModelLoad", "ModelUnload"), closed)
    else:
        loads, unloads = Rpc(changes.load), Rpc(changes.unload)
        repository = {"Index": Rpc(changes.index, "models"), "ModelLoad": loads, "ModelUnload": unloads}
    methods = {
        "ServerLive": Rpc(kserve.live, open=True, health=True),
        "ServerReady": Rpc(kserve.ready, health=True),
        "ModelReady": Rpc(kserve.model_ready, health=True),
        "ServerMetadata": Rpc(kserve.server),
        "ModelMetadata": Rpc(kserve.metadata),
        "ModelConfig": Rpc(kserve.config, "config"),
        "ModelStatistics": Rpc(_statistics),
        **{f"Repository{name}": rpc for name, rpc in repository.items()},
    }
    shared = _refusal("shared memory is not supported", "Send tensors in raw_input_contents")
    for kind in ("System", "Cuda"):
        methods |= {f"{kind}SharedMemory{what}": shared for what in ("Status", "Register", "Unregister")}
    settings = _refusal("settings can't be changed over gRPC", "They are options of infer serve")
    return methods | {"TraceSetting": settings, "LogSettings": settings}


class RpcServer:
    """gRPC server of one service, on the running event loop.

    `listener`: bound socket whose port it takes; `credentials`: of TLS; `changes`: see `rpcs`.
    """

    def __init__(
        self,
        life: RequestLife,
        listener: socket.socket,
        credentials: grpc.ServerCredentials | None = None,
        changes: Repository | None = None,
    ) -> None:
        self.life, self._messages = life, message_classes(PROTO)
        limits = life.service.limits
        self._server = grpc.aio.server(
            options=_channel_options(limits), maximum_concurrent_rpcs=limits.max_connections
        )
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(
                partial(
                    self._answer,
                    self._route(name, rpc.handler, open=rpc.open),
                    partial(self._call, name, rpc),
                )
            )
            for name, rpc in rpcs(changes).items()
        }
        infer = self._route("ModelInfer", kserve.infer, work=True)
        handlers["ModelInfer"] = grpc.stream_unary_rpc_method_handler(
            partial(self._answer, infer, self._infer)
        )
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        self._stream_route = self._route("ModelStreamInfer", kserve.infer, work=True)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        address = address_of(listener)
        try:
            if credentials is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise BusyError(
                f"gRPC can't listen at {address}: {error}", hint="Choose another --grpc-port"
            ) from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Close the port; what still runs is cancelled after a moment."""
        await self._server.stop(LINGER)

    def _route(self, name: str, handler: Handler, *, open: bool = False, work: bool = False) -> Route:
        path = f"/{SERVICE}/{name}"
        return Route("GRPC", path, None, ErrorText, handler, name, ERROR_FORMAT, open=open, work=work)

    def _begin(self, route: Route, call: grpc.aio.ServicerContext) -> RequestContext:
        lines = [
            (key.encode(), value if isinstance(value, bytes) else value.encode())
            for key, value in call.invocation_metadata() or ()
        ]
        return self.life.begin(route, {}, lines, method="GRPC", client=_client_address(call.peer()))

    async def _answer(
        self,
        route: Route,
        respond: Callable[[RequestContext, bytes], Awaitable[bytes]],
        _: object,
        call: grpc.aio.ServicerContext,
    ) -> bytes:
        """Answer a call of one message by `respond`, or end it with the status of its error.

        Methods of one message are read as streams too, so that the key is checked and a slow client has ended before
        its message is in memory.
        """
        began, context = time.perf_counter(), self._begin(route, call)
        with self.life.running(context, began) as share:
            try:
                self.life.admit(context)
                body = await self._read(call, share)
                context.seconds = call.time_remaining()
                answer = await respond(context, body)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
                failure = self.life.failed(context, error)
            else:
                self.life.count(context, 200, began)
                call.set_trailing_metadata(_trailing(context))
                return answer
            await self._refuse(context, call, failure, began)
        return b""

    async def _refuse(
        self, context: RequestContext, call: grpc.aio.ServicerContext, failure: Response, began: float
    ) -> None:
        """End a call with the status of a failure; raises what gRPC raises for that."""
        self.life.count(context, failure.status, began)
        code = CODES.get(failure.status, grpc.StatusCode.UNKNOWN)
        await call.abort(code, _text(failure), _trailing(context, failure))

    async def _read(self, call: grpc.aio.ServicerContext, share: BodyReservation) -> bytes:
        """Read the only message of a call. Raises `SlowBodyError`, `TooLargeError` and `OverloadedError`."""
        limits = self.life.service.limits
        seconds = limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await call.read()
        except TimeoutError as error:
            raise SlowBodyError(f"the message did not arrive within {seconds:g} s") from error
        if body is grpc.aio.EOF:  # gRPC itself has told the client
            raise TooLargeError(f"expected one message of at most {limits.max_body_bytes} bytes")
        share.take(len(body))
        return bytes(body)

    def _parse(self, name: str, body: bytes) -> Any:
        try:
            return self._messages[name].FromString(body)
        except DecodeError as error:
            raise InputError(f"expected a message {name}: {error}") from error

    async def _call(self, name: str, rpc: Rpc, context: RequestContext, body: bytes) -> bytes:
        """Answer one call of a method that has a REST handler."""
        if f"{name}Request" not in self._messages:  # refused by name
            return bytes(await rpc.handler(context))
        request = json_format.MessageToDict(
            self._parse(f"{name}Request", body), preserving_proto_field_name=True
        )
        if request.get("repository_name"):
            raise InputError("expected no repository_name: this server has one repository")
        version = request.get("version")
        context.path = {
            "model": request.get("model_name") or request.get("name", ""),
            **({"version": version} if version else {}),
        }
        context.body = msgspec.json.encode(request)
        response = self._messages[f"{name}Response"]()
        try:
            value = await rpc.handler(context)
        except (NotReadyError, NotFoundError):
            if not rpc.health:
                raise
            return b""
        if not isinstance(value, Response):
            plain = msgspec.to_builtins(value)
            plain = {rpc.field: plain} if rpc.field else plain
            json_format.ParseDict(plain, response, ignore_unknown_fields=True)
        return bytes(response.SerializeToString())

    async def _infer(self, context: RequestContext, body: bytes) -> bytes:
        response = self._messages["ModelInferResponse"]()
        await self._run(context, body, response)
        return bytes(response.SerializeToString())

    async def _run(self, context: RequestContext, body: bytes, response: Any) -> None:
        message = self._parse("ModelInferRequest", body)
        context.began, context.body = time.monotonic(), body
        response.id = message.id
        engine = self.life.service.engine(message.model_name, message.model_version or None)
        context.model = engine.info.name
        request, sections = read_request(message)
        result, wanted = await kserve_request.run(context, engine, request, sections)
        fill_response(response, engine, request.id, result, wanted)

    async def _stream(self, _: object, call: grpc.aio.ServicerContext) -> None:
        """Answer the requests of a stream in their order; several run at a time, each a request of its own."""
        began, context = time.perf_counter(), self._begin(self._stream_route, call)
        try:
            self.life.admit(context)
        except InferError as error:
            await self._refuse(context, call, self.life.failed(context, error), began)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(MOST_STREAMED)

        async def read() -> None:
            while (body := await call.read()) is not grpc.aio.EOF:
                await answers.put(group.create_task(self._streamed(call, bytes(body))))
            await answers.put(None)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            while (answer := await answers.get()) is not None:
                await call.write(await answer)

    async def _streamed(self, call: grpc.aio.ServicerContext, body: bytes) -> bytes:
        """Answer one request of a stream; an error is a message of it."""
        began, context = time.perf_counter(), self._begin(self._stream_route, call)
        answer = self._messages["ModelStreamInferResponse"]()
        with self.life.running(context, began) as share:
            status = 200
            try:
                self.life.admit(context)
                share.take(len(body))
                context.seconds = call.time_remaining()
                await self._run(context, body, answer.infer_response)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
                failure = self.life.failed(context, error)
                status = failure.status
                answer.error_message = _text(failure)
            self.life.count(context, status, began)
        return bytes(answer.SerializeToString())


def _channel_options(limits: ServeLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", int(1000 * limits.header_seconds)),
        ("grpc.max_connection_idle_ms", 1000 * limits.keep_alive_seconds),
        ("grpc.keepalive_time_ms", 1000 * limits.keep_alive_seconds),
        ("grpc.so_reuseport", 0),
    ]


def _client_address(peer: str) -> str:
    """Return the address in a peer of gRPC: ipv4:127.0.0.1:4711, ipv6:%5B::1%5D:4711."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _text(failure: Response) -> str:
    return msgspec.json.decode(failure.body, type=ErrorText).error


def _trailing(context: RequestContext, failure: Response | None = None) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata: the id, and what HTTP says about retries in headers."""
    pairs = [("x-request-id", context.request_id)]
    if context.trace is not None:
        pairs.append(("traceresponse", context.trace.header().decode()))
    for name, value in failure.headers if failure is not None else ():
        if name != b"connection":
            pairs.append((name.decode(), value.decode()))
        if name == b"retry-after-ms":
            pairs.append(("grpc-retry-pushback-ms", value.decode()))
    return tuple(pairs)


def server_credentials(
    certfile: str | os.PathLike[str], keyfile: str | os.PathLike[str] | None = None
) -> grpc.ServerCredentials:
    """Return TLS credentials of PEM files that `tls_context` has checked."""
    chain, key = Path(certfile).read_bytes(), Path(keyfile or certfile).read_bytes()
    return grpc.ssl_server_credentials([(key, chain)])
