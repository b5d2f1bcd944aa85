"""Open the models to serve, in worker processes or in this one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...artifact.manifest import read_manifest
from ...artifact.model_info import ModelInfo
from ...errors import ArtifactError, NotUsableError, UsageError
from ..model_repository import ModelLocation
from ..served_model import ServedLanguageModel, ServedModel, load
from .messages import LanguageModelInfo, ModelSource, WorkerReady
from .remote_engine import RemoteEngine
from .remote_language_model import RemoteLanguageModel
from .replica import Replica
from .restart_policy import RestartLimits, WatchdogLimits, WorkerLostError
from .supervisor import SupervisedWorker


class StartingModel:
    """Workers of one model that open it in the background; `wait_ready` waits for them."""

    def __init__(
        self,
        source: ModelSource,
        replicas: int = 1,
        *,
        text: bool = False,
        watch: WatchdogLimits | None = None,
        restart: RestartLimits | None = None,
    ) -> None:
        self._text, self._path = text, source.path
        self._workers: list[SupervisedWorker] = []
        for _ in range(replicas):
            plain = SupervisedWorker(source, watch=watch, restart=restart) if text else None
            self._workers.append(plain or Replica(source, watch=watch, restart=restart))
        for worker in self._workers:
            worker.start()

    def wait_ready(self) -> ServedModel:
        """Return the model; on failure stop the workers and raise."""
        try:
            opened = [worker.wait() for worker in self._workers]
        except WorkerLostError as error:
            self.close()
            raise ArtifactError(
                f"the model's process ended while it opened the artifact: {error}",
                where=self._path,
                hint="'infer verify' opens it alone; memory may have run out, or the artifact is damaged",
            ) from error
        except BaseException:
            self.close()
            raise
        if self._text:
            return served_language_model(self._workers[0], opened[0])
        return ServedModel(
            info=opened[0].info,
            close=self.close,
            replicas=[worker for worker in self._workers if isinstance(worker, Replica)],
            phases=opened[0].phases,
            speeds=opened[0].speeds,
            in_workers=True,
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def served_language_model(
    worker: SupervisedWorker,
    opened: WorkerReady,
    text_side: Callable[
        [RemoteEngine, ModelInfo, LanguageModelInfo], ServedLanguageModel
    ] = RemoteLanguageModel,
) -> ServedModel:
    """Return the model of a worker that is ready; `text_side` reads its text files in this process."""
    if opened.language_model is None:
        raise NotUsableError(f"{opened.info.name} can't generate")
    engine_client = RemoteEngine(worker, name=opened.info.name)
    return ServedModel(
        info=opened.info,
        close=engine_client.close,
        language_model=text_side(engine_client, opened.info, opened.language_model),
        phases=opened.phases,
        speeds=opened.speeds,
        in_workers=True,
    )


def start_loading(source: ModelSource, replicas: int, *, watchdog: float) -> StartingModel:
    """Start the workers of one model."""
    text, watch = is_language_model(Path(source.path)), WatchdogLimits(batch=watchdog, idle=watchdog)
    return StartingModel(source, 1 if text else replicas, text=text, watch=watch)


class InProcessModel:
    """Counterpart of `StartingModel` that opens the model in this process, and warms it up where `warm`."""

    def __init__(self, source: ModelSource, *, warm: bool = False) -> None:
        self._source, self._warm = source, warm
        self._stack = contextlib.ExitStack()

    def wait_ready(self) -> ServedModel:
        began = time.perf_counter()
        model = load(self._source.path, **self._source.options)
        self._stack.callback(model.close)
        model.info, model.phases = self._source.named(model.info), {"open": time.perf_counter() - began}
        if self._warm:
            model.speeds = model.warmup()
        return model

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True)
class ModelLoader:
    """Options with which this server opens models, at the start and on later load requests.

    `options`: arguments of `Predictor.load`; `caches`: bytes that a KV cache may take, by folder, which
    override `options`; `watchdog`: seconds.
    """

    options: Mapping[str, Any]
    replicas: int = 1
    in_process: bool = False
    watchdog: float = 30.0
    caches: dict[Path, int | None] = field(default_factory=dict)

    def source(self, location: ModelLocation) -> ModelSource:
        """Return the worker's description of one model."""
        cache = self.caches.get(location.path, self.options.get("kv_memory"))
        options = {**self.options, "kv_memory": cache}
        return ModelSource(
            path=str(location.path), name=location.name, version=location.version, options=options
        )

    def open(self, chosen: Sequence[ModelLocation], stack: contextlib.ExitStack) -> list[ServedModel]:
        """Open all of `chosen`, workers in parallel; `stack` closes them. Raises what opening raises."""
        if self.in_process and self.replicas > 1:
            raise UsageError("several replicas need worker processes", where="--replicas")
        starting = []
        for location in chosen:
            starting.append(self.begin(location, warm=False))
            stack.callback(starting[-1].close)
        models = []
        for model in starting:
            models.append(model.wait_ready())
            stack.callback(models[-1].close)
        return models

    def begin(self, location: ModelLocation, *, warm: bool = True) -> StartingModel | InProcessModel:
        """Start to open one model; `wait_ready` of the result blocks until it is open.

        `warm`: also warm up one in this process; workers always are.
        """
        if self.in_process or sys.platform == "win32":
            return InProcessModel(self.source(location), warm=warm)
        return start_loading(self.source(location), self.replicas, watchdog=self.watchdog)


def startup_summary(models: Sequence[ServedModel], *, server: float, opening: float) -> str:
    """Return one line with the seconds of each phase of the start.

    `ready after 2.41 s: server 0.52, models 1.89 (minilm: python 0.10, import 1.02, …)`
    """
    parts = [
        f"{model.info.name}: "
        + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in model.phases.items())
        for model in models
    ]
    total = server + opening
    return f"ready after {total:.2f} s: server {server:.2f}, models {opening:.2f} ({'; '.join(parts)})"


def is_language_model(folder: Path) -> bool:
    """Return True for a readable artifact that generates text; opening any other one says what is wrong with it."""
    try:
        return read_manifest(folder).meta.get("generation") is not None
    except ArtifactError:
        return False
