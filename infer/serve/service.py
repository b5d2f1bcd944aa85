"""What the routes talk to: the served models, the server's state, its limits and counters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import __version__
from ..errors import NotFoundError, NotReadyError, UsageError
from .engine import Engine
from .limits import ServeLimits, check_model_name
from .metrics import Metrics
from .routing import Route


class Service:
    """`engines`: model name → engine. `state` goes starting → ready → draining, never back."""

    def __init__(
        self, predictors: Iterable[Any], limits: ServeLimits | None = None, *, api_key: str | None = None
    ) -> None:
        self.limits = limits or ServeLimits()
        self.api_key = api_key.encode() if api_key else None
        self.metrics = Metrics(__version__)
        self.version = __version__
        self.state = "starting"
        self.active = 0  # requests being answered
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="infer-text")
        self.engines: dict[str, Engine] = {}
        self.routes: list[Route] = []  # the table, once the app is built
        for predictor in predictors:
            self._add(predictor)

    def _add(self, predictor: Any) -> None:
        name, version = check_model_name(predictor.name), predictor.version
        if name in self.engines:
            raise UsageError(
                f"two models are named {name!r}",
                hint="Serve one of them, or make it again under another name",
            )
        engine = self.engines[name] = Engine(predictor, self.limits, self.metrics.model(name, version))
        watch = self.metrics.watch
        watch("requests_running", "Rows in the batch that runs now", name, version, lambda: engine.running)
        watch("requests_waiting", "Requests in the queue", name, version, lambda: engine.batcher.requests)
        age = "engine_heartbeat_age_seconds"
        watch(age, "Since the engine last looked", name, version, lambda: engine.clock() - engine.beat)

    def start(self) -> None:
        """On the running event loop, after the models are warm."""
        home = asyncio.get_running_loop()
        for engine in self.engines.values():
            engine.start(home)
        self.state = "ready"

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.healthy

    @property
    def healthy(self) -> bool:
        return all(engine.healthy for engine in self.engines.values()) or self.state == "starting"

    @property
    def died(self) -> bool:
        """An engine ended for a reason of its own; the process is of no more use."""
        return any(engine.failure is not None for engine in self.engines.values())

    def engine(self, name: str, version: str | None = None) -> Engine:
        """Raises `NotFoundError` for a name or version that is not served."""
        engine = self.engines.get(name)
        if engine is None:
            raise NotFoundError("no such model is served", hint=f"Served: {', '.join(self.engines)}")
        if version is not None and version != engine.predictor.version:
            raise NotFoundError(f"model {name} has version {engine.predictor.version} only")
        return engine

    def require_ready(self) -> None:
        if self.state != "ready":
            raise NotReadyError(
                "the server is starting" if self.state == "starting" else "the server is stopping"
            )

    def drain(self) -> None:
        """Admit nothing more; `idle` becomes true when all that was admitted is answered."""
        self.state = "draining"
        for engine in self.engines.values():
            engine.drain()

    @property
    def idle(self) -> bool:
        return self.active == 0 and all(engine.idle for engine in self.engines.values())

    def stop(self) -> None:
        """End the engines; what still waits is refused."""
        self.state = "draining"
        for engine in self.engines.values():
            engine.stop(NotReadyError("the server is stopping"))
        self.pool.shutdown(wait=False, cancel_futures=True)
