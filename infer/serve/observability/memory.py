"""How much memory the server and its models take: read from the kernel and from what was measured of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from ...artifact.manifest import MANIFEST, MAX_BYTES
from ...errors import SourceError
from ...regular_files import read_regular
from .prometheus_text import Count, Family, reading

LOOK_SECONDS = 10.0  # between two looks for new child processes, which read all of /proc
ENOUGH_TOKENS = 1 << 16  # as `generate.pages` has it
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
KINDS = {"weights": "weights", "run": "scratch"}  # field of the report's memory → kind


class Processes:
    """This process and its children."""

    def __init__(self) -> None:
        self._all = [psutil.Process()]
        self._looked = time.monotonic()

    def resident_bytes(self) -> int:
        """Of all of them; pages that they share count for each."""
        if (now := time.monotonic()) - self._looked > LOOK_SECONDS:
            self._all, self._looked = [self._all[0], *self._all[0].children()], now
        total = 0
        for process in self._all:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total


def page_bytes(predictor: Any) -> int:
    """Of one page of a language model's KV cache, all layers together; 0 where it has none."""
    if not (getattr(predictor.manifest, "meta", None) or {}).get("generation"):
        return 0
    if (card := getattr(predictor, "card", None)) is not None:
        return card.page_bytes
    from ...predict import generation_shape  # and torch, which a server of workers has no need of

    shape = generation_shape(predictor.manifest)
    return shape.layers * shape.page_bytes if shape is not None else 0


def cache_bytes(folder: Path, asked: int | None, left: int) -> int:
    """Of the KV cache in RAM that the model in `folder` will take: what is `asked`, else what its engine takes by
    itself of the bytes that are `left`: a quarter, or what 65,536 tokens or one context need. 0 of other models and on
    GPUs."""
    try:
        manifest = json.loads(read_regular(folder / MANIFEST, MAX_BYTES))
        shape = (manifest.get("meta") or {}).get("generation")
        if shape is None or manifest.get("device") != "cpu":
            return 0
        if asked is not None:
            return asked
        kind = shape.get("kv_dtype", "float16")
        head = shape["head_dim"] * ITEM_BYTES.get(kind, 4) + (4 if kind == "int8" else 0)
        token = 2 * shape["layers"] * shape["kv_heads"] * head
        return min(left // 4, max(ENOUGH_TOKENS, shape["max_positions"]) * token)
    except (SourceError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return 0  # opening it will say what is wrong


def measured_bytes(predictor: Any) -> dict[str, int]:
    """By kind, as the artifact's report has it."""
    memory = (getattr(predictor, "report", None) or {}).get("memory")
    known = memory if isinstance(memory, dict) else {}
    return {
        kind: int(known[name]) for name, kind in KINDS.items() if isinstance(known.get(name), int | float)
    }


class MemoryCollector:
    """`infer_memory_bytes`, by kind; the peak is the highest that was seen at a scrape, of all processes together."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.peak = processes, 0
        self.fixed: dict[tuple[str, str], dict[str, int]] = {}
        self.pages: dict[tuple[str, str], tuple[int, Callable[[], Any]]] = {}

    def add(self, predictor: Any, stats: Callable[[], Any] | None) -> None:
        """`stats`: of a language model, its engine's."""
        labels = predictor.name, predictor.version
        self.fixed[labels] = measured_bytes(predictor)
        if stats is not None and (size := page_bytes(predictor)):
            self.pages[labels] = size, stats

    def forget(self, labels: tuple[str, str]) -> None:
        self.fixed.pop(labels, None)
        self.pages.pop(labels, None)

    def collect(self) -> Iterable[Family[Count]]:
        text = "Memory of the models as measured when they were made, of KV caches, and of the server's processes"
        family = reading("gauge", "infer_memory_bytes", text, ("model", "version", "kind"))
        for labels, kinds in self.fixed.items():
            for kind, value in kinds.items():
                family.labels(*labels, kind).set(value)
        for labels, (size, stats) in self.pages.items():
            family.labels(*labels, "kv").set(size * stats().pages_total)
        resident = self.processes.resident_bytes()
        self.peak = max(self.peak, resident)
        family.labels("", "", "resident").set(resident)
        family.labels("", "", "peak").set(self.peak)
        yield family
