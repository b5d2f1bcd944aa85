"""A worker and a process above it: `python -m infer.budget_search.trial_process.subreaper PARENT SOCKET`, by numbers.

The one above ends everything that the worker started, whatever ends the worker or the search.
A compiler that a worker runs is no child of the search, may lead a session of its own, and would outlive a SIGKILL.
Linux gives the orphans of its descendants to a child subreaper (prctl(2)), so that none is out of its reach. The kernel
does not end it with its parent as it ends other children: a SIGKILL would leave it no time for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

import psutil

from ...process.child import end_with_parent

PR_SET_CHILD_SUBREAPER = 36
REAP = 5.0  # seconds between two looks for orphans that ended


def main(arguments: list[str]) -> int:
    """Fork, and serve trials in the child; torch is imported by it alone."""
    pipe = int(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the search's terminal: the search decides
    fork_child(pipe)
    from . import worker

    return worker.main(pipe)


def fork_child(pipe: int) -> None:
    """Return in a forked child; the process that called stays above it and never returns.

    It ends with its child, in the same way, or when nobody holds the other end of `pipe` any more: then the search is
    gone. All descendants are killed first. Where the system has no subreapers nothing is forked.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        end_with_parent(own)
        return
    status = _wait(child, pipe)
    _kill_descendants()
    _exit_with(status)


def _wait(child: int, pipe: int) -> int:
    """Return the wait status of the child, or of an exit with code 1 when the search is gone."""
    watched = select.poll()
    watched.register(os.pidfd_open(child), select.POLLIN)
    watched.register(pipe, select.POLLRDHUP)
    while True:
        if any(handle == pipe for handle, _ in watched.poll(1000 * REAP)):
            return 1 << 8
        for pid, status in _reaped():
            if pid == child:
                return status


def _reaped() -> list[tuple[int, int]]:
    """Reap children that ended; return their ids and wait statuses."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def _kill_descendants() -> None:
    """Kill until no child is left: children of a killed process become children of this one."""
    while family := psutil.Process().children(recursive=True):
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        _reaped()
        time.sleep(0.005)


def _exit_with(status: int) -> None:
    """End with the exit code or the signal of a wait status, without a core file of our own."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
