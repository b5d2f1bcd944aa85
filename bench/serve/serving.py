"""Servers in processes of their own: started, waited for until they answer, ended with all of their children."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.shared.repository import ROOT, child_environment

START_SECONDS, END_SECONDS = 180.0, 60.0
Server = tuple[int, subprocess.Popen[str]]  # port and process


class NotStartedError(RuntimeError):
    """A server that ended, or did not answer in time."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    """Return True if a port accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    *,
    port: int = 0,
    log: Path | None = None,
    cwd: Path = ROOT,
    answers: Callable[[int], bool] = accepts,
    **environment: str,
) -> Iterator[Server]:
    """Start a server and yield its port and process once it `answers`. Raises `NotStartedError`.

    `port`: that the command names; 0: the server prints its address on stdout. `log`: file for what else it says.
    Threads of all servers sleep at OpenMP's barriers: those that spin would starve the servers whose turn it is.
    """
    env = child_environment(OMP_WAIT_POLICY="passive", PYTHONFAULTHANDLER="1", **environment)
    with log.open("w") if log else contextlib.nullcontext() as said:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=(said or subprocess.DEVNULL) if port else subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        try:
            port = port or _printed_port(process)
            _wait(process, port, answers, log)
            yield port, process
        finally:
            _end(process, log)


def _printed_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
    return int(found[1]) if found else 0


def _wait(
    process: subprocess.Popen[str], port: int, answers: Callable[[int], bool], log: Path | None
) -> None:
    until = time.monotonic() + START_SECONDS
    while port and process.poll() is None and time.monotonic() < until:
        if answers(port):
            return
        time.sleep(0.05)
    last = log.read_text().strip()[-2000:] if log else "no log"
    raise NotStartedError(f"{process.args!r} does not answer: {last}")


def _end(process: subprocess.Popen[str], log: Path | None) -> None:
    """End a server and what it leaves; one that does not end on demand says where its threads are."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        process.wait()
        if log:
            raise SystemExit(f"the server did not end: {log.read_text()[-6000:]}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout:
            process.stdout.close()
