"""An engine in a process of its own: when it crashes, the benchmark goes on and says how it ended.

Imports the standard library alone, so that a process starts as fast as its engine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PATIENCE = 10.0  # seconds that a process may take to end after its pipe has closed


class Seconds(float):
    """Seconds that a call has taken in another process, measured there."""


class EngineCrashed(RuntimeError):
    """End of an engine's process in the middle of a call: `crashed: signal 11`."""


class ChildProcess:
    """An object made by `make(*arguments)` in a process of its own, started afresh; its methods are called over a pipe.

    `make`, arguments and results are pickled: a function of a module, and plain values or numpy arrays. An exception in
    the child is raised here as a `RuntimeError` of its text, a crash as `EngineCrashed`.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_answer, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the object returns."""
        return self._ask(method, arguments)[0]

    def timed(self, method: str, *arguments: Any) -> Seconds:
        """Call a method and return the seconds that it took in its process, without the way there and back."""
        return Seconds(self._ask(method, arguments)[1])

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, float]:
        try:
            self._pipe.send((method, arguments))
        except BrokenPipeError as error:
            raise EngineCrashed(self._ending()) from error
        return self._receive()

    def _receive(self) -> tuple[Any, float]:
        try:
            right, value, seconds = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise EngineCrashed(self._ending()) from error
        if not right:
            raise RuntimeError(value)
        return value, seconds

    def _ending(self) -> str:
        self._process.join(PATIENCE)
        code = self._process.exitcode
        return f"crashed: signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own; raises `EngineCrashed` where that process crashes."""
    child = ChildProcess(_Once, function, arguments)
    try:
        return child.call("run")
    finally:
        child.close()


class _Once:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments

    def run(self) -> Any:
        return self._function(*self._arguments)


def _answer(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make the object and answer calls until the pipe closes."""
    found: Any = None
    method = ""
    while True:
        began = time.perf_counter()
        try:
            value = getattr(found, method)(*arguments) if method else make(*arguments)
            answer = (True, value if method else None, time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is told to who asked
            answer = (False, f"{type(error).__name__}: {error}", 0.0)
        found = found if method else value if answer[0] else None
        pipe.send(answer)
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
