"""The service on Ray Serve: its replica, and the application for `serve deploy` and `infer serve --ray`.

    import_path: infer.serve.ray_app:application     # in Ray's own config file; `args` are fields of `ServeOptions`

A replica is a server process, as without Ray, and its models run in worker processes beside it: a request
that kills its worker fails alone. Ray supervises the server process. Admission control stays in the replica:
Ray lets more requests through than a replica's queue holds, so that refusals have the replica's status and
`Retry-After`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InferError, UsageError
from ..options import Field, fields, from_values
from ..plan import SERVED
from .http.app import Scope, build
from .http.body import Receive, Send
from .model_repository import ModelLocation
from .observability.request_log import attach
from .options import ServeOptions
from .service import Service
from .workers.model_loading import ModelLoader

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Message

NAME = "infer"
SPARE_REQUESTS = 64  # beyond a replica's queue: those that are being read, refused or answered
QUEUED_IN_RAY = 64  # in each proxy, while no replica takes any; the rest gets 503 and Retry-After
RETRY_SECONDS = 1.0
# Options of a server without Ray, and those of the cluster, which replicas are not told.
LOCAL = (
    "grpc_port",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_keyfile_password",
    "allow_hosts",
    *SERVED,
    "lora",
    "memory",
    "allow_reload",
    "timings",
)
CLUSTER = ("host", "port", "anonymous", "api_key_file", "ray", "ray_address", "ray_config")


def check(options: ServeOptions) -> None:
    """Raise `UsageError` for options that Ray deployments do not support."""
    if said := [
        field.flag for field in fields(ServeOptions) if field.name in LOCAL and _is_set(options, field)
    ]:
        raise UsageError(
            f"--ray has no {', '.join(said)}",
            hint="Leave them out, or serve without --ray; certificates belong to what stands before Ray's proxy",
        )
    if (options.max_replicas or options.replicas) < options.replicas:
        raise UsageError(
            f"expected --max-replicas of {options.replicas} or more, as --replicas says, got {options.max_replicas}"
        )
    if options.target_requests <= 0:
        raise UsageError(f"expected --target-requests above 0, got {options.target_requests}")


def _is_set(options: ServeOptions, field: Field) -> bool:
    return getattr(options, field.name) != field.default


def deployment_options(options: ServeOptions) -> dict[str, Any]:
    """Return the options of `ray.serve.deployment`."""
    bounds = options.bounds
    found: dict[str, Any] = {
        "name": NAME,
        "ray_actor_options": {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        "max_ongoing_requests": bounds.max_queue_requests + SPARE_REQUESTS,
        "max_queued_requests": QUEUED_IN_RAY,
        "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_SECONDS},
        "graceful_shutdown_timeout_s": bounds.drain_seconds,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }
    if options.max_replicas is None:
        found["num_replicas"] = options.replicas
    else:
        found["autoscaling_config"] = {
            "min_replicas": options.replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests,
        }
    return found


def replica_args(options: ServeOptions) -> dict[str, Any]:
    """Return the arguments of `application`: options that differ from their default, as plain values."""
    named = [field for field in fields(ServeOptions) if field.name not in (*LOCAL, *CLUSTER)]
    return {f.name: msgspec.to_builtins(getattr(options, f.name)) for f in named if _is_set(options, f)}


def from_args(args: Mapping[str, Any]) -> ServeOptions:
    """Return the options from `replica_args`; raise `UsageError`. Reads the files of earlier versions too."""
    own = dict(args)
    logs = own.pop("observing", None) or {}  # until 0.1, in place of the three
    for old, new in (("requests", "log_requests"), ("bodies", "log_bodies"), ("traces", "otel")):
        if old in logs:
            own.setdefault(new, logs[old])
    return from_values(ServeOptions, {name: value for name, value in own.items() if value is not None})


class RayReplica:
    """One replica of the service, created by Ray on some node."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        options = from_args(args)
        # No replica knows the responses of another.
        bounds = msgspec.structs.replace(options.bounds, max_stored_bytes=0)
        self.stack = contextlib.ExitStack()
        loader = ModelLoader(
            options.load_options, in_process=options.in_process, watchdog=bounds.watchdog_seconds
        )
        # Ray calls this on the thread that its replica ends with, so workers end with it too: see `Process`.
        models = loader.open([ModelLocation(path=Path(path)) for path in options.artifacts], self.stack)
        self.service = Service(
            models,
            bounds,
            api_key=list(options.api_key) or None,
            share_prefix_cache=options.share_prefix_cache,
        )
        attach(self.service, requests=options.log_requests, bodies=options.log_bodies, traces=options.otel)
        for engine in self.service.models.values():
            engine.warmup()

    def __serve_build_asgi_app__(self) -> Any:  # noqa: PLW3201 - the name that Ray asks for
        app = build(self.service)
        app.lifespan_context = self._lifespan
        return _without_id(app)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.service.start()
        try:
            yield
        finally:
            self.service.stop()
            await asyncio.to_thread(self.stack.close)

    async def check_health(self) -> None:
        """Raise when unhealthy: Ray then replaces the replica."""
        if not self.service.healthy:
            raise InferError("an engine died or is stuck")


def _without_id(app: ASGIApp) -> ASGIApp:
    """Drop the response's x-request-id header, which Ray's proxy adds itself."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def shortened(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            await send(message)

        await app(scope, receive, shortened if scope["type"] == "http" else send)

    return wrapped


def application(args: Mapping[str, Any]) -> Any:
    """Return the application for `serve.run`; raise `UsageError` for wrong `args`."""
    from ray import serve

    try:
        options = from_args(args)
    except UsageError as error:
        raise UsageError(f"the application can't be made: {error}", where="args") from error
    check(options)
    deployment = serve.deployment(serve.ingress()(RayReplica)).options(**deployment_options(options))
    return deployment.bind(replica_args(options))
