"""Backends with planted faults, installed by an entry point: each fails in its own way while it lowers."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from infer import plugins

NAMES = ("segfault", "hang", "eater", "full_disk", "broken", "wrong", "gated")
GATE = "PLANTED_GATE"  # names a file: while it exists, `gated` does not go on


class Planted:
    """The eager backend, with a fault before it lowers."""

    EXECUTES_CODE, PORTABLE, STEPS = True, False, True

    def __init__(self, fault: Callable[[], None], *, wrong: bool = False) -> None:
        self._fault, self._wrong = fault, wrong

    def missing(self) -> str | None:
        return None

    def refuses(self, graph: Any, plan: Any) -> str | None:
        return None

    def target(self, device: str) -> dict[str, str]:
        return {}

    def lower(self, graph: Any, plan: Any, folder: Path) -> Any:
        self._fault()
        return plugins.get("backends", "eager").lower(graph, plan, folder)

    def open(self, folder: Path, device: str) -> Any:
        runner = plugins.get("backends", "eager").open(folder, device)
        return WrongRunner(runner) if self._wrong else runner


class WrongRunner:
    """Answers with twice what is right."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.inputs, self.outputs = runner, runner.inputs, runner.outputs

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: 2 * value for name, value in self._runner.run(inputs).items()}

    def close(self) -> None:
        self._runner.close()


def _crash() -> None:
    ctypes.string_at(0)


def _sleep() -> None:
    """Hang, with a compiler in a session of its own."""
    subprocess.Popen(["sleep", "3600"], start_new_session=True).wait()


def _eat() -> None:
    held = []
    while True:
        held.append(np.ones(1 << 23))  # 64 MiB, touched
        time.sleep(0.02)


def _fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _break() -> None:
    raise RuntimeError("compiler error: unknown opcode 7")


def _wait_for_gate() -> None:
    """Write the process id beside the gate, and wait until it is gone."""
    gate = Path(os.environ[GATE])
    if gate.exists():
        gate.with_suffix(".waits").write_text(str(os.getpid()))
    while gate.exists():
        time.sleep(0.05)


gated = Planted(_wait_for_gate)
segfault, hang, eater = Planted(_crash), Planted(_sleep), Planted(_eat)
full_disk, broken = Planted(_fill), Planted(_break)
wrong = Planted(lambda: None, wrong=True)


def install(folder: Path) -> Path:
    """Write the metadata of a package that offers these backends; its folder goes on the path."""
    place = folder / "planted-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    lines = [f"{name} = {__name__}:{name}" for name in NAMES]
    (place / "entry_points.txt").write_text("\n".join(["[infer.backends]", *lines, ""]))
    return folder


def descendants_of(pid: int) -> list[int]:
    """Return the processes below a process that are not zombies."""
    found = children_of(pid)
    return [*found, *(below for one in found for below in descendants_of(one))]


def children_of(pid: int) -> list[int]:
    """Return the processes of a parent that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}") / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Return the first true value of a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"never came true after {seconds} s, in process {os.getpid()}")
