"""Executors: run the batches of one model, here or in another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ...errors import InferError
from .arrays import Arrays, run_arrays


class Executor(Protocol):
    """Runs one batch after another; see `LocalExecutor` and `workers.replica.Replica`."""

    answering: bool  # a batch would run now
    watched: bool  # a batch that hangs raises `LostError`
    pid: int | None  # of the worker process; None: this process
    began: float  # clock time at which the worker began the last batch

    def fileno(self) -> int: ...

    def new(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray: ...

    def run(self, inputs: Arrays) -> tuple[Arrays, float]: ...

    def abandon(self) -> None: ...

    def look(self) -> None: ...

    def blame_request(self) -> None: ...

    def restart(self, stopping: Callable[[], bool]) -> None: ...


class LocalExecutor:
    """Executor that calls a predictor in this process."""

    answering, watched = True, False
    pid: int | None = None
    began = 0.0

    def __init__(self, predictor: Any, clock: Callable[[], float]) -> None:
        self._predictor, self._clock = predictor, clock

    def fileno(self) -> int:
        return -1

    def new(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def run(self, inputs: Arrays) -> tuple[Arrays, float]:
        began = self._clock()
        outputs = run_arrays(self._predictor, inputs)
        return outputs, self._clock() - began

    def abandon(self) -> None:
        pass

    def look(self) -> None:
        pass

    def blame_request(self) -> None:
        pass

    def restart(self, stopping: Callable[[], bool]) -> None:
        raise InferError("a model in the server's own process cannot be restarted")
