"""What a worker asks itself while nobody else asks: its own question, whose answer it knows.

A worker whose answers have become wrong ends itself, and one that gives none any more is silent or says so: the front
looks at that, and no probe from outside ever runs a model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArtifactError, InferError
from ...llm.engine.requests import Output, Request, Sampling
from ..batching.run_arrays import Arrays, run_arrays

log = logging.getLogger("infer.serve.workers")
EVERY = 5.0  # seconds without a question from elsewhere
MOST_SHARE = 0.01  # of the time that this may take
PATIENCE = 10.0  # seconds in which tokens must come; after three times as many the worker ends itself
TOLERANCE = 1e-3  # between two answers of one process, relative in norm
MISSES = 3


class Rest:
    """When to ask: after so long without work, and seldom where it takes long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._due = clock, clock() + EVERY

    @property
    def over(self) -> bool:
        return self.clock() >= self._due

    def begin(self, timings: float = 0.0) -> None:
        """There was work, or a question that took so many seconds."""
        self._due = self.clock() + max(EVERY, timings / MOST_SHARE)


class GoldenBatch:
    """The golden inputs of an artifact of tensors; without them it asks nothing."""

    def __init__(self, predictor: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.rest, self._predictor = Rest(clock), predictor
        self._inputs = _first_row(predictor)
        self._known = self._answer()

    def look(self) -> None:
        """To be called while there is nothing to do. Raises `ArtifactError` when the answer has changed."""
        if self._inputs is None or not self.rest.over:
            return
        began = self.rest.clock()
        found = self._answer()
        self.rest.begin(self.rest.clock() - began)
        for name, value in self._known.items():
            if not near(found[name], value):
                raise ArtifactError(
                    f"{name} of the golden inputs is not what it was when this process started"
                )

    def _answer(self) -> Arrays:
        if self._inputs is None:
            return {}
        return {name: np.array(value) for name, value in run_arrays(self._predictor, self._inputs).items()}


class GoldenPrompt:
    """Two tokens of a language model; `look` is to be called about twice a second."""

    def __init__(self, driver: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.rest, self._driver = Rest(clock), driver
        self._asked: float | None = None  # when, if the answer is to come
        self._known: list[int] = []
        self._found: list[int] = []
        self._number = self._misses = 0

    @property
    def answering(self) -> bool:
        """Whether the last question was answered in time, or may still be."""
        return self._asked is None or self.rest.clock() - self._asked < PATIENCE

    def look(self) -> None:
        """Raises `InferError` when the answer has changed, or does not come."""
        if self._asked is None and self._found:
            self._compare()
        if self._asked is not None:
            if self.rest.clock() - self._asked > 3 * PATIENCE:
                raise InferError(f"two tokens did not come within {3 * PATIENCE:.0f} s")
        elif self._driver.running:
            self.rest.begin()
        elif self.rest.over:
            self._asked, self._found, self._number = self.rest.clock(), [], self._number + 1
            sampling = Sampling(max_tokens=2, ignore_eos=True, temperature=0.0)
            self._driver.submit(
                Request(id=f"golden {self._number}", prompt=[0], sampling=sampling), self._take
            )

    def _compare(self) -> None:
        """Whoever joins its batch may turn a near tie, so it must be another answer three times in a row."""
        found, self._found = self._found, []
        self._known = self._known or found
        self._misses = 0 if found == self._known else self._misses + 1
        if self._misses >= MISSES:
            raise ArtifactError("the worker's own question gets other tokens than when it started")

    def _take(self, outputs: list[Output]) -> None:
        """On the driver's thread."""
        for output in outputs:
            self._found += output.token_ids
            if output.finish is not None and self._asked is not None:
                self.rest.begin(self.rest.clock() - self._asked)
                self._asked = None


def near(found: np.ndarray, known: np.ndarray) -> bool:
    if known.dtype.kind not in "fc":
        return bool(np.array_equal(found, known))
    finite = np.isfinite(known)
    if not np.array_equal(np.isfinite(found), finite):
        return False
    if not np.array_equal(found[~finite], known[~finite], equal_nan=True):
        return False
    now, then = (value[finite].astype(np.complex128) for value in (found, known))
    return bool(np.linalg.norm(now - then) <= TOLERANCE * max(float(np.linalg.norm(then)), 1e-12))


def _first_row(predictor: Any) -> Arrays | None:
    from safetensors.numpy import load_file

    path = getattr(predictor, "path", None)
    file = None if path is None else Path(path) / "golden/inputs.safetensors"
    if file is None or not file.is_file() or any(spec.dtype == "bfloat16" for spec in predictor.inputs):
        return None  # numpy can't hold that
    arrays = load_file(file)
    return {s.name: arrays[s.name][:1] if s.batched else arrays[s.name] for s in predictor.inputs}
