"""The same service on Ray Serve: what one replica is, and the application for `serve deploy` and `infer serve --ray`.

    import_path: infer.serve.ray_app:application     # in Ray's own config file; `args` are the fields of `Asked`

A replica is a front, as without Ray, and its models run in processes of their own beside it: a request that kills its
process fails alone. Ray supervises the front. Admission stays ours: Ray lets more requests through than a replica's
queue holds, so that a refusal is the replica's, with its status and its `Retry-After`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from ..errors import InferError, UsageError
from . import opening
from .app import Scope, build
from .limits import ServeLimits
from .observing import Observing, attach
from .service import Service
from .streaming import Receive, Send
from .worker.messages import Source

NAME = "infer"
SPARE_REQUESTS = 64  # beyond a replica's queue: those that are being read, refused or answered
QUEUED_IN_RAY = 64  # in each proxy, while no replica takes any; the rest gets 503 and Retry-After
RETRY_SECONDS = 1.0


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is deployed. Paths must mean the same on every node. `num_cpus`, `num_gpus`: of one replica, as Ray counts.

    `in_process`: models run in the replica's own process, which a request can kill with all that it has.
    With `max_replicas` there are `replicas` of them or more: as many as keep each at `target_requests`, running and
    waiting together. `api_key` goes to the cluster with the rest of it.
    """

    artifacts: list[str]
    replicas: int = 1
    max_replicas: int | None = None
    target_requests: float = 16.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    in_process: bool = False
    device: str = "auto"
    threads: int | None = None
    trust_code: bool = False
    kv_memory: str | int | None = None
    max_tokens_per_step: int | None = None
    batch_invariant: bool = False
    share_prefix_cache: bool = False
    api_key: str | list[str] | None = None
    limits: ServeLimits = ServeLimits()
    observing: Observing = Observing()

    def check(self) -> None:
        """Raises `UsageError` for what can't be deployed."""
        if not self.artifacts:
            raise UsageError("nothing to serve", hint="Name at least one artifact")
        if self.replicas < 1 or (self.max_replicas or self.replicas) < self.replicas:
            raise UsageError(f"expected 1 or more replicas and as many or more at most, got {self.replicas}")
        if min(self.num_cpus, self.num_gpus) < 0 or self.target_requests <= 0:
            raise UsageError("resources are 0 or more, and a target above 0")

    def options(self) -> dict[str, Any]:
        """Of `ray.serve.deployment`."""
        found: dict[str, Any] = {
            "name": NAME,
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
            "max_ongoing_requests": self.limits.max_queue_requests + SPARE_REQUESTS,
            "max_queued_requests": QUEUED_IN_RAY,
            "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_SECONDS},
            "graceful_shutdown_timeout_s": self.limits.drain_seconds,
            "health_check_period_s": 2.0,
            "health_check_timeout_s": 10.0,
        }
        if self.max_replicas is None:
            found["num_replicas"] = self.replicas
        else:
            found["autoscaling_config"] = {
                "min_replicas": self.replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_requests,
            }
        return found


class Replica:
    """One copy of the service, made by Ray on some node."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        wanted = msgspec.convert(asked, Asked)
        self.stack = contextlib.ExitStack()
        names = ("device", "threads", "trust_code", "kv_memory", "max_tokens_per_step", "batch_invariant")
        options = {name: getattr(wanted, name) for name in names}
        sources = [Source(path=path, options=options) for path in wanted.artifacts]
        # Ray calls this on the thread that its replica ends with, so workers end with it too: see `Process`.
        opened = opening.open_models(
            sources,
            self.stack,
            in_process=wanted.in_process,
            watchdog=wanted.limits.watchdog_seconds,
        )
        self.service = Service(
            [predictor for predictor, _ in opened],
            wanted.limits,
            api_key=wanted.api_key,
            share_prefix_cache=wanted.share_prefix_cache,
        )
        attach(self.service, wanted.observing)
        for model in self.service.models.values():
            model.warmup()

    def __serve_build_asgi_app__(self) -> Any:  # noqa: PLW3201 - the name that Ray asks for
        app = build(self.service)
        app.lifespan_context = self._lifespan
        return _without_id(app)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        self.service.start()
        try:
            yield
        finally:
            self.service.stop()
            await asyncio.to_thread(self.stack.close)

    async def check_health(self) -> None:
        """Ray asks now and then, and makes another replica in place of one that raises."""
        if not self.service.healthy:
            raise InferError("an engine died or is stuck")


def _without_id(app: Any) -> Any:
    """Ray's proxy says the id of a request in its answer, the caller's where it came with one; once is enough."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def shortened(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            await send(message)

        await app(scope, receive, shortened if scope["type"] == "http" else send)

    return wrapped


def application(args: Mapping[str, Any]) -> Any:
    """What `serve.run` takes. Raises `UsageError` for wrong `args`."""
    from ray import serve

    try:
        asked = msgspec.convert(args, Asked)
    except msgspec.ValidationError as error:
        raise UsageError(f"the application can't be made: {error}", where="args") from error
    asked.check()
    deployment = serve.deployment(serve.ingress()(Replica)).options(**asked.options())
    return deployment.bind(msgspec.to_builtins(asked))
