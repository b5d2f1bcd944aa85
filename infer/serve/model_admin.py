"""Load, replace and unload models while the server runs; a failed load leaves everything as it was."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from ..errors import BusyError, NotFoundError, NotReadyError, ResourceError
from .batching.tensor_engine import TensorEngine
from .llm.llm_engine import LLMEngine
from .model_repository import ModelLocation, ModelRepository, name_and_version
from .observability.memory import cache_bytes
from .served_model import ServedModel
from .service import Service
from .workers.model_loading import InProcessModel, StartingModel

log = logging.getLogger("infer.serve")
LINGER = 1.0  # seconds for requests that looked a model up before it was replaced
PROCESS_BYTES = 300 << 20  # of a worker beside its model: Python, torch
State = Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


class RepositoryModel(msgspec.Struct):
    """A model in the repository index; `reason`: why it is not ready, after an error."""

    name: str
    version: str
    state: State
    reason: str = ""


COLLECTIONS = 20  # tried for a replaced model


class ModelAdmin:
    """Changes of the served models.

    `opener` starts to open an artifact and returns at once; `wait_ready` of its result blocks in a thread. It
    looks up in `caches` how large a KV cache may be.
    """

    def __init__(
        self,
        service: Service,
        repository: ModelRepository,
        opener: Callable[[ModelLocation], StartingModel | InProcessModel],
        *,
        replicas: int = 1,
        memory: int | None = None,
        kv_memory: int | None = None,
        caches: dict[Path, int | None] | None = None,
        linger: float = LINGER,
    ) -> None:
        self.service, self.repository, self._opener = service, repository, opener
        self._replicas, self._memory, self._linger = replicas, memory, linger
        self._kv_memory, self._caches = kv_memory, {} if caches is None else caches
        self._changing: dict[str, State] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._opened: set[StartingModel | InProcessModel | ServedModel] = set()  # closed at the end
        self._tasks: set[asyncio.Task[None]] = set()

    def index(self) -> list[RepositoryModel]:
        """Return all models in the repository folders, and all that are served."""
        served = {name: model.info.version for name, model in self.service.models.items()}
        known = {(name, version): None for name, version, _ in self.repository.all()}
        known |= dict.fromkeys(served.items())
        listed = []
        for name, version in known:
            state: State = "READY" if served.get(name) == version else "UNAVAILABLE"
            newest = version == max((v for n, v in known if n == name), key=_number)
            if name in self._changing and newest:
                state = self._changing[name]
            listed.append(RepositoryModel(name, version, state, self._reasons.get((name, version), "")))
        return listed

    async def load(self, name: str) -> None:
        """Serve a model's highest version, in place of the version served now, if any.

        Raises `NotFoundError`, `BusyError`, `ResourceError` with figures, and what opening it raises; the
        served models are unchanged then. Goes on when the caller is cancelled, as `unload` does: half a change would
        leave processes that nobody ends.
        """
        await asyncio.shield(self._in_background(self._load(name)))

    async def _load(self, name: str) -> None:
        with self._exclusive(name, "LOADING"):
            location = await asyncio.to_thread(self.repository.find, name)
            version = name_and_version(location)[1]
            try:
                _, self._caches[location.path] = await asyncio.to_thread(
                    check_memory,
                    *(location.path, name, self._replicas, self._memory, self.service),
                    kv_memory=self._kv_memory,
                )
                model = await self._open(location)
            except Exception as error:
                self._reasons[name, version] = str(error)
                raise
            self._reasons.pop((name, version), None)
            if self.service.state != "ready":
                await asyncio.to_thread(model.close)
                raise NotReadyError("the server is stopping")
            old = self.service.install(model)
            log.info("serving %s version %s", name, model.info.version)
            if old is not None:
                self._in_background(self._retire(old))

    async def _open(self, location: ModelLocation) -> ServedModel:
        """Return a model that is being opened; what is opened is closed with the server."""
        starting = self._opener(location)
        self._opened.add(starting)
        try:
            model = await asyncio.to_thread(starting.wait_ready)
        except Exception:
            self._opened.discard(starting)
            raise
        self._opened.discard(starting)
        self._opened.add(model)
        return model

    async def unload(self, name: str) -> None:
        """Stop serving a model after its pending requests. Raise `NotFoundError` or `BusyError`."""
        await asyncio.shield(self._in_background(self._unload(name)))

    async def _unload(self, name: str) -> None:
        with self._exclusive(name, "UNLOADING"):
            if name not in self.service.models:
                raise NotFoundError("no such model is served")
            old = self.service.remove(name)
            await self._retire(old)

    def close(self) -> None:
        """Close the models that were opened here."""
        for model in self._opened:
            model.close()

    @contextlib.contextmanager
    def _exclusive(self, name: str, state: State) -> Iterator[None]:
        if name in self._changing:
            raise BusyError("this model is being loaded or unloaded")
        if self.service.state != "ready":
            raise NotReadyError(f"the server is {self.service.state}")
        self._changing[name] = state
        try:
            yield
        finally:
            del self._changing[name]

    def _in_background(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a change that goes on when nobody waits for it."""
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            _ = done.cancelled() or done.exception()  # read: its client may be gone

        task.add_done_callback(ended)
        return task

    async def _retire(self, old: TensorEngine | LLMEngine) -> None:
        """Drain, stop and close a model that can no longer be looked up."""
        until = time.monotonic() + self.service.limits.drain_seconds
        await asyncio.sleep(self._linger)
        while not old.idle and time.monotonic() < until:
            await asyncio.sleep(0.02)
        old.drain()
        while not old.idle and time.monotonic() < until:
            await asyncio.sleep(0.02)
        old.stop(NotReadyError("this version was replaced"))
        self.service.forget(old)
        await asyncio.to_thread(old.model.close)
        self._opened.discard(old.model)
        self._in_background(_collect(weakref.ref(old)))


async def _collect(gone: weakref.ref[TensorEngine | LLMEngine]) -> None:
    """Collect cycles until a replaced model is gone: some hold descriptors, and a server's gc seldom runs by itself."""
    for _ in range(COLLECTIONS):
        await asyncio.sleep(0.2)  # threads that still end hold it
        gc.collect()
        if gone() is None:
            return


def _number(version: str) -> tuple[int, str]:
    return (int(version), "") if version.isdigit() else (-1, version)


def check_memory(
    path: Path,
    name: str,
    replicas: int,
    budget: int | None,
    service: Service | None,
    *,
    kv_memory: int | None = None,
    taken: int = 0,
) -> tuple[int, int | None]:
    """Return the bytes that a model needs, and the limit of its KV cache where a `budget` sets one.

    Counted are its files, which every worker maps, a worker's own libraries, and a KV cache of a given size.
    Raises `ResourceError` when that exceeds the free memory, or what is left of the budget, after `taken`
    bytes of others.
    """
    files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    asked = cache_bytes(path, kv_memory, 0)
    need = files + replicas * PROCESS_BYTES + asked
    left, where = int(psutil.virtual_memory().available) - taken, "are free on this machine"
    if budget is not None:
        used = service.memory.resident_bytes() if service is not None else 0
        if budget - used - taken < left:
            left = max(budget - used - taken, 0)
            where = f"are left of the {_gib(budget)} memory limit"
    if need > left:
        parts = f"{_gib(files)} of files, {_gib(replicas * PROCESS_BYTES)} for {replicas} processes"
        parts += f", {_gib(asked)} for its KV cache" if asked else ""
        raise ResourceError(
            f"{name} needs about {_gib(need)} of memory ({parts}), {_gib(max(left, 0))} {where}",
            hint="Unload another model first, or serve fewer replicas",
        )
    cache = cache_bytes(path, None, left - need) if budget is not None and kv_memory is None else 0
    return need + cache, cache or kv_memory


def check_all(
    chosen: Iterable[ModelLocation], replicas: int, budget: int | None, kv_memory: int | None
) -> dict[Path, int | None]:
    """Run `check_memory` for models served together; return each one's KV-cache limit by folder."""
    taken, caches = 0, dict[Path, int | None]()
    for location in chosen:
        need, caches[location.path] = check_memory(
            location.path, location.path.name, replicas, budget, None, kv_memory=kv_memory, taken=taken
        )
        taken += need
    return caches


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
