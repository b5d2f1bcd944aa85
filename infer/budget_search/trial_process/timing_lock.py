"""One lock for each machine, so that two searches do not spoil each other's times."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "infer-search-timing.lock"


class TimingLock:
    """Shared while a trial compresses and lowers, exclusive while it is timed.

    So nothing of another search runs beside a measurement. `step` receives a sentence when there is a wait, `waiting`
    True when it begins and False when it ends.
    """

    def __init__(
        self,
        step: Callable[[str, str], None],
        path: Path | None = None,
        waiting: Callable[[bool], None] | None = None,
    ) -> None:
        self._step, self._waiting = step, waiting or (lambda began: None)
        self._path = path or Path(os.environ.get("TMPDIR", "/tmp")) / NAME  # noqa: S108 - of all processes
        self._handle: int | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the lock shared: waits while another search times."""
        self._handle = _open(self._path)
        try:
            self._take(fcntl.LOCK_SH, "another search on this machine is timing")
            yield
        finally:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Hold the lock exclusively: waits until other searches finish lowering. Called within `working`."""
        self._take(fcntl.LOCK_EX, "another search on this machine is busy; times are taken when it pauses")
        try:
            yield
        finally:
            self._take(fcntl.LOCK_SH, "another search on this machine is timing")

    def _take(self, kind: int, sentence: str) -> None:
        """Convert the lock; a conversion first gives up the lock held, so that two waiters never block each other."""
        if self._handle is None:
            return
        try:
            fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self._step("wait", sentence)
            self._waiting(True)
            fcntl.flock(self._handle, kind)
            self._waiting(False)


def _open(path: Path) -> int | None:
    """Open the lock file of the machine, shared by its users; None where the place can't be written."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(handle, 0o666)
        return handle
    return None
