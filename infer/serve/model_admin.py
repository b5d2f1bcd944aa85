"""Models come and go while the server runs: a new version takes over between two requests, or nothing changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from ..errors import BusyError, NotFoundError, NotReadyError, ResourceError
from .batching.tensor_engine import TensorEngine
from .llm.llm_engine import Generator
from .model_repository import Found, Repository, named
from .observability.memory import cache_bytes
from .service import Service

log = logging.getLogger("infer.serve")
LINGER = 1.0  # seconds in which whoever looked a model up before it was replaced still asks it
PROCESS_BYTES = 300 << 20  # of a worker beside its model: Python, torch
State = Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


class Listed(msgspec.Struct):
    """`reason`: why it is not ready, where something went wrong."""

    name: str
    version: str
    state: State
    reason: str = ""


class Admin:
    """`opener` starts to open an artifact, at once; its result's `remote()` waits for that, in a thread. It finds in
    `caches` how large a KV cache may be."""

    def __init__(
        self,
        service: Service,
        repository: Repository,
        opener: Callable[[Found], Any],
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
        self._opened: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def index(self) -> list[Listed]:
        """Everything in the folders, and whatever else is served."""
        served = {name: model.predictor.version for name, model in self.service.models.items()}
        known = {(name, version): None for name, version, _ in self.repository.all()}
        known |= dict.fromkeys(served.items())
        listed = []
        for name, version in known:
            state: State = "READY" if served.get(name) == version else "UNAVAILABLE"
            newest = version == max((v for n, v in known if n == name), key=_number)
            if name in self._changing and newest:
                state = self._changing[name]
            listed.append(Listed(name, version, state, self._reasons.get((name, version), "")))
        return listed

    async def load(self, name: str) -> None:
        """Serve its highest version in place of the one that is served now, if any.

        Raises `NotFoundError`, `BusyError`, `ResourceError` with figures, and what opening it raises; then all is as it
        was.
        """
        with self._only(name, "LOADING"):
            found = await asyncio.to_thread(self.repository.find, name)
            version = named(found)[1]
            try:
                _, self._caches[found.path] = await asyncio.to_thread(
                    check_memory,
                    *(found.path, name, self._replicas, self._memory, self.service),
                    kv_memory=self._kv_memory,
                )
                starting = self._opener(found)
                self._opened.append(starting)
                predictor = await asyncio.to_thread(starting.remote)
            except Exception as error:
                self._reasons[name, version] = str(error)
                raise
            self._reasons.pop((name, version), None)
            if self.service.state != "ready":
                await asyncio.to_thread(predictor.close)
                raise NotReadyError("the server is stopping")
            self._opened.append(predictor)
            old = self.service.install(predictor)
            log.info("serving %s version %s", name, predictor.version)
            if old is not None:
                self._later(old)

    async def unload(self, name: str) -> None:
        """Serve it no more; what was asked of it is answered. Raises `NotFoundError`, `BusyError`."""
        with self._only(name, "UNLOADING"):
            if name not in self.service.models:
                raise NotFoundError("no such model is served")
            old = self.service.remove(name)
            await self._retire(old)

    def close(self) -> None:
        """End what was opened here."""
        for one in self._opened:
            one.close()

    @contextlib.contextmanager
    def _only(self, name: str, state: State) -> Any:
        if name in self._changing:
            raise BusyError("this model is being loaded or unloaded")
        if self.service.state != "ready":
            raise NotReadyError(f"the server is {self.service.state}")
        self._changing[name] = state
        try:
            yield
        finally:
            del self._changing[name]

    def _later(self, old: TensorEngine | Generator) -> None:
        task = asyncio.get_running_loop().create_task(self._retire(old))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _retire(self, old: TensorEngine | Generator) -> None:
        """It answers what it was asked, and is asked by nobody who looks it up now."""
        until = time.monotonic() + self.service.limits.drain_seconds
        await asyncio.sleep(self._linger)
        while not old.idle and time.monotonic() < until:
            await asyncio.sleep(0.02)
        old.drain()
        while not old.idle and time.monotonic() < until:
            await asyncio.sleep(0.02)
        old.stop(NotReadyError("this version was replaced"))
        self.service.forget(old)
        await asyncio.to_thread(old.predictor.close)


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
    """The bytes that it needs, and those that its KV cache may take where nobody said so and there is a `budget`.

    Raises `ResourceError` when the artifact does not fit into what is free, or left of the budget, after `taken` bytes
    of others. Counted are its files, which every worker maps, a worker's own libraries, and a KV cache of a size that
    was said.
    """
    files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    asked = cache_bytes(path, kv_memory, 0)
    need = files + replicas * PROCESS_BYTES + asked
    left, where = int(psutil.virtual_memory().available) - taken, "are free on this machine"
    if budget is not None:
        used = service.memory.processes.resident_bytes() if service is not None else 0
        if budget - used - taken < left:
            left = max(budget - used - taken, 0)
            where = f"are left of the {_gib(budget)} that the server may take"
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
    chosen: Iterable[Found], replicas: int, budget: int | None, kv_memory: int | None
) -> dict[Path, int | None]:
    """`check_memory` of models that are served together: by folder, what the KV cache of each may take."""
    taken, caches = 0, dict[Path, int | None]()
    for found in chosen:
        need, caches[found.path] = check_memory(
            found.path, found.path.name, replicas, budget, None, kv_memory=kv_memory, taken=taken
        )
        taken += need
    return caches


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
