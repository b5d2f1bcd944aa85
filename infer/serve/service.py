"""Service: served models, state, limits and metrics that the routes use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .. import __version__
from ..errors import NotFoundError, NotReadyError, UsageError
from .batching.tensor_engine import TensorEngine
from .http.access_control import ApiKeys
from .http.routing import Observer, Route
from .limits import ServeLimits, check_model_name
from .llm.llm_engine import LLMEngine
from .media_decoder.processes import MediaDecoders
from .observability.llm_metrics import EngineCollector, LLMMetricFamilies, LLMMetrics
from .observability.memory import MemoryCollector
from .observability.metrics import Metrics
from .served_model import ServedLanguageModel, ServedModel


class Service:
    """Served models of one server. `models`: by name; `state`: starting → ready → draining."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        limits: ServeLimits | None = None,
        *,
        api_key: str | Sequence[str] | None = None,
        share_prefix_cache: bool = False,
    ) -> None:
        self.limits = limits or ServeLimits()
        self.keys = ApiKeys([api_key] if isinstance(api_key, str) else api_key) if api_key else None
        self.share_prefix_cache = share_prefix_cache  # also between different API keys
        self.metrics = Metrics(__version__)
        self.version = __version__
        self.instance = os.urandom(4).hex()
        self.state = "starting"
        self.active = 0  # requests in progress
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="infer-text")
        self.decoders = MediaDecoders()  # of image and sound files
        self.grammars = ThreadPoolExecutor(8, thread_name_prefix="infer-grammar")  # threads that wait
        self.models: dict[str, TensorEngine | LLMEngine] = {}
        self.adapters: dict[str, str] = {}  # adapter name → model name
        self.collector, self.generation = EngineCollector(), LLMMetricFamilies(self.metrics.registry)
        self.memory = MemoryCollector()
        for collector in (self.collector, self.memory):
            self.metrics.registry.read(collector.collect)
        self.routes: list[Route] = []  # set when the app is built
        self.retiring: list[TensorEngine | LLMEngine] = []  # replaced or removed, still running requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self.observers: list[Observer] = []  # called at the end of every request
        self.traces = False  # start a trace for requests without one
        for model in models:
            self._add(model)

    def _add(self, model: ServedModel) -> None:
        name, version = check_model_name(model.info.name), model.info.version
        if name in self.models and self._loop is None:
            raise UsageError(
                f"name collision: two models are called {name!r}",
                hint="Serve one of them, or optimize it again under another name",
            )
        language_model = model.language_model
        engine = self._engine(model) if language_model is None else self._generator(model, language_model)
        self.models[name] = engine
        if self._loop is not None:
            engine.start(self._loop)
        self.memory.add(model)
        watch = self.metrics.add_gauge
        watch("requests_running", "Rows in the running batch", name, version, lambda: engine.running)
        watch("requests_waiting", "Requests in the queue", name, version, lambda: engine.waiting)
        age = "engine_heartbeat_age_seconds"
        watch(
            age,
            "Seconds since the engine's last heartbeat",
            name,
            version,
            lambda: engine.clock() - engine.beat,
        )

    def _engine(self, model: ServedModel) -> TensorEngine:
        name, version = model.info.name, model.info.version
        several = self.keys is not None and len(self.keys) > 1
        metrics = self.metrics.model(name, version)
        return TensorEngine(model, self.limits, metrics, shared_by_tenants=several)

    def _generator(self, model: ServedModel, language_model: ServedLanguageModel) -> LLMEngine:
        name, version = model.info.name, model.info.version
        counters = LLMMetrics(self.metrics, self.generation, name, version)
        generator = LLMEngine(model, language_model, self.limits, counters)
        self.collector.stats[name, version] = generator.engine_client.stats
        counters.add_step_tokens(generator.engine_client.stats)
        for adapter in generator.adapters:
            if adapter == name or adapter in self.models or self.adapters.get(adapter, name) != name:
                raise UsageError(
                    f"name collision: {adapter} names two adapters, or an adapter and a model", where=name
                )
            self.adapters[adapter] = name
        return generator

    def refused(self, status: int) -> None:
        """Count a request that was refused before routing."""
        self.metrics.request("", "", status, "wire", 0.0)

    def start(self) -> None:
        """Start the engines on the running event loop, after warm-up."""
        self._loop = asyncio.get_running_loop()
        for model in self.models.values():
            model.start(self._loop)
        if any(model.media is not None and model.media.steps for model in self.models.values()):
            self.decoders.start()
        self.state = "ready"

    def install(self, model: ServedModel) -> TensorEngine | LLMEngine | None:
        """Serve a model from now on; call on the event loop.

        Returns the model of its name that it replaces, which finishes its requests; the caller gives it to `forget`.
        """
        name = check_model_name(model.info.name)
        old = self.remove(name) if name in self.models else None
        self._add(model)
        return old

    def remove(self, name: str) -> TensorEngine | LLMEngine:
        """Stop serving a model and return it; it finishes its requests."""
        old = self.models.pop(name)
        self.adapters = {adapter: owner for adapter, owner in self.adapters.items() if owner != name}
        self.retiring.append(old)
        return old

    def forget(self, old: TensorEngine | LLMEngine) -> None:
        """Remove a replaced model that has ended, with its metrics."""
        self.retiring.remove(old)
        labels = old.info.name, old.info.version
        now = self.models.get(labels[0])
        if now is None or now.info.version != labels[1]:
            self.metrics.remove_gauges(*labels)
            self.collector.stats.pop(labels, None)
            self.memory.forget(labels)

    @property
    def _all(self) -> list[TensorEngine | LLMEngine]:
        return [*self.models.values(), *self.retiring]

    @property
    def ready(self) -> bool:
        """True if the server accepts requests and every model can run one."""
        return self.state == "ready" and all(model.ready for model in self.models.values())

    @property
    def unready_reason(self) -> str:
        """Reason why `ready` is false."""
        if self.state != "ready":
            return f"the server is {self.state}"
        if not self.healthy:
            return "an engine died or hangs"
        if reason := next(
            (model.not_ready_reason for model in self.generators.values() if model.not_ready_reason), None
        ):
            return reason
        away = [name for name, model in self.models.items() if not model.ready]
        return f"no worker of {', '.join(away)} is ready; crashed workers are being restarted"

    @property
    def healthy(self) -> bool:
        """True if no engine died or hangs, or the server is starting."""
        return all(model.healthy for model in self.models.values()) or self.state == "starting"

    @property
    def died(self) -> bool:
        """True if an engine ended by an error; the server then exits."""
        return any(model.failure is not None for model in self.models.values())

    @property
    def engines(self) -> dict[str, TensorEngine]:
        """Tensor models by name."""
        return {name: model for name, model in self.models.items() if isinstance(model, TensorEngine)}

    @property
    def generators(self) -> dict[str, LLMEngine]:
        """Language models by name."""
        return {name: model for name, model in self.models.items() if isinstance(model, LLMEngine)}

    def engine(self, name: str, version: str | None = None) -> TensorEngine:
        """Return the engine of a tensor model. Raises `NotFoundError` for a name or version that is not served."""
        engine = self.models.get(name)
        if isinstance(engine, LLMEngine):
            raise NotFoundError(f"{name} is a language model", hint="It is served at /v1/completions")
        if engine is None:
            raise NotFoundError("no such model is served", hint=f"Served: {', '.join(self.engines)}")
        if version is not None and version != engine.info.version:
            raise NotFoundError(f"model {name} has only version {engine.info.version}")
        return engine

    def drain(self) -> None:
        """Admit no new request; `idle` becomes true when all admitted ones are answered."""
        self.state = "draining"
        for model in self._all:
            model.drain()

    @property
    def idle(self) -> bool:
        """True if no request is in progress or queued."""
        return self.active == 0 and all(model.idle for model in self._all)

    def stop(self) -> None:
        """Stop the engines; queued requests fail with `NotReadyError`."""
        self.state = "draining"
        for model in self._all:
            model.stop(NotReadyError("the server is stopping"))
        for observer in self.observers:
            observer.close()
        self.decoders.close()
        for pool in (self.pool, self.grammars):
            pool.shutdown(wait=False, cancel_futures=True)
