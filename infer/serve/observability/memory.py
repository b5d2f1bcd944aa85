"""Memory of the server and its models, from the kernel and from the artifacts' reports."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from ...artifact.manifest import MANIFEST, MAX_BYTES
from ...errors import SourceError
from ...regular_files import read_regular
from ..served_model import ServedLanguageModel, ServedModel
from .prometheus_text import Family, Scalar

LOOK_SECONDS = 10.0  # between two looks for new child processes, which read all of /proc
ENOUGH_TOKENS = 1 << 16  # as `generate.pages` has it
STATE_ROWS = 2 * 64 + 64  # as `CacheSizes` has it by default
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
KINDS = {"weights": "weights", "run": "scratch"}  # field of the report's memory → kind


def cache_bytes(folder: Path, asked: int | None, left: int) -> int:
    """Return the bytes of RAM that the KV cache of the model in `folder` will take.

    That is `asked`, else the engine's default: a quarter of the `left` bytes, at most what 65,536 tokens or
    one context and the states of its sequences need. 0 for other models and on GPUs.
    """
    try:
        manifest = json.loads(read_regular(folder / MANIFEST, MAX_BYTES))
        shape = (manifest.get("meta") or {}).get("generation")
        if shape is None or manifest.get("device") != "cpu":
            return 0
        if asked is not None:
            return asked
        kind = shape.get("kv_dtype", "float16")
        head = shape["head_dim"] * ITEM_BYTES.get(kind, 4) + (4 if ITEM_BYTES.get(kind) == 1 else 0)
        token = 2 * shape["layers"] * shape["kv_heads"] * head
        states = STATE_ROWS * 4 * shape.get("state_floats", 0)
        return min(left // 4, max(ENOUGH_TOKENS, shape["max_positions"]) * token + states)
    except (SourceError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return 0  # opening it will say what is wrong


def measured_bytes(report: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes by kind from an artifact's report."""
    memory = report.get("memory")
    known = memory if isinstance(memory, dict) else {}
    return {
        kind: int(known[name]) for name, kind in KINDS.items() if isinstance(known.get(name), int | float)
    }


class MemoryCollector:
    """Collector of `infer_memory_bytes` by kind; the peak is the highest sum seen at a scrape."""

    def __init__(self) -> None:
        self.peak = 0
        self._processes, self._looked = [psutil.Process()], time.monotonic()  # the server and its children
        self.fixed: dict[tuple[str, str], dict[str, int]] = {}
        self.generating: dict[tuple[str, str], ServedLanguageModel] = {}

    def add(self, model: ServedModel) -> None:
        labels = model.info.name, model.info.version
        self.fixed[labels] = measured_bytes(model.report())
        if model.language_model is not None and model.language_model.page_bytes:
            self.generating[labels] = model.language_model

    def forget(self, labels: tuple[str, str]) -> None:
        self.fixed.pop(labels, None)
        self.generating.pop(labels, None)

    def resident_bytes(self) -> int:
        """Return the sum of the processes' resident sets; shared pages count for each."""
        if (now := time.monotonic()) - self._looked > LOOK_SECONDS:
            server = self._processes[0]
            self._processes, self._looked = [server, *server.children()], now
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def collect(self) -> Iterable[Family[Scalar]]:
        text = "Memory in bytes: models as measured at optimization, KV caches, and resident server processes"
        family = Family("gauge", "infer_memory_bytes", text, ("model", "version", "kind"), Scalar)
        for labels, kinds in self.fixed.items():
            for kind, value in kinds.items():
                family.labels(*labels, kind).set(value)
        for labels, language_model in self.generating.items():
            pages = language_model.engine_client.stats().pages_total
            family.labels(*labels, "kv").set(language_model.page_bytes * pages)
        resident = self.resident_bytes()
        self.peak = max(self.peak, resident)
        family.labels("", "", "resident").set(resident)
        family.labels("", "", "peak").set(self.peak)
        yield family
