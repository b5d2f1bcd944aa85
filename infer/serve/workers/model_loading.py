"""Opens what is to be served: in processes of its own, or in this one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...artifact.manifest import read_manifest
from ...errors import ArtifactError, UsageError
from ..model_repository import Found
from .messages import Source, rename
from .remote_predictor import Starting
from .supervisor import WatchLimits
from .warmup import generates

Opened = tuple[Any, dict[str, float]]  # a predictor, and the seconds of each part of opening it


def open_models(
    sources: Sequence[Source],
    stack: contextlib.ExitStack,
    *,
    in_process: bool,
    replicas: int = 1,
    watchdog: float = 30.0,
) -> list[Opened]:
    """All of them, `stack` closes them; workers open theirs side by side. Raises what opening raised."""
    if replicas < 1 or (in_process and replicas > 1):
        raise UsageError("more replicas need processes of their own", where="--replicas")
    if in_process or sys.platform == "win32":
        return [_here(source, stack) for source in sources]
    starting = []
    for source in sources:
        starting.append(begin(source, replicas, watchdog=watchdog))
        stack.callback(starting[-1].close)
    opened: list[Opened] = []
    for one in starting:
        remote = one.remote()
        stack.callback(remote.close)
        opened.append((remote, remote.phases))
    return opened


def begin(source: Source, replicas: int, *, watchdog: float) -> Starting:
    """Start its workers."""
    text, watch = is_language_model(Path(source.path)), WatchLimits(batch=watchdog, idle=watchdog)
    return Starting(source, 1 if text else replicas, text=text, watch=watch)


@dataclass(frozen=True)
class Opener:
    """How this server opens what it finds: the ones it starts with, and those that are loaded later.

    `options`: of `Predictor.load`; `caches`: by folder the bytes a KV cache may take, which outrank what `options`
    say; `watchdog`: seconds.
    """

    options: Mapping[str, Any]
    replicas: int = 1
    in_process: bool = False
    watchdog: float = 30.0
    caches: dict[Path, int | None] = field(default_factory=dict)

    def source(self, found: Found) -> Source:
        """What to open it from."""
        cache = self.caches.get(found.path, self.options.get("kv_memory"))
        own = {**self.options, "kv_memory": cache}
        return Source(path=str(found.path), name=found.name, version=found.version, options=own)

    def open(self, chosen: Sequence[Found], stack: contextlib.ExitStack) -> list[Opened]:
        """All of them; see `open_models`."""
        return open_models(
            [self.source(found) for found in chosen],
            stack,
            in_process=self.in_process,
            replicas=self.replicas,
            watchdog=self.watchdog,
        )

    def begin(self, found: Found) -> Starting | Here:
        """Start to open one more; `remote()` of it waits until that is done."""
        if self.in_process:
            return Here(self.source(found))
        return begin(self.source(found), self.replicas, watchdog=self.watchdog)


class Here:
    """As `Starting`, but in this process."""

    def __init__(self, source: Source) -> None:
        self._source, self._stack = source, contextlib.ExitStack()

    def remote(self) -> Any:
        predictor, _ = _here(self._source, self._stack)
        predictor.warmup()
        return predictor

    def close(self) -> None:
        self._stack.close()


def times(opened: Sequence[Opened], *, server: float, opening: float) -> str:
    """`ready after 2.41 s: server 0.52, models 1.89 (minilm: python 0.10, import 1.02, …)`"""
    parts = [
        f"{predictor.name}: " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
        for predictor, phases in opened
    ]
    total = server + opening
    return f"ready after {total:.2f} s: server {server:.2f}, models {opening:.2f} ({'; '.join(parts)})"


def _here(source: Source, stack: contextlib.ExitStack) -> Opened:
    from ...predict import Predictor

    began = time.perf_counter()
    predictor = rename(stack.enter_context(Predictor.load(source.path, **source.options)), source)
    return predictor, {"open": time.perf_counter() - began}


def is_language_model(folder: Path) -> bool:
    """Return True for a readable artifact that generates text; opening any other one says what is wrong with it."""
    try:
        return generates(read_manifest(folder))
    except ArtifactError:
        return False
