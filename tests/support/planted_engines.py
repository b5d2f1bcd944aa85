"""Engines that crash as a library does, for processes that a test starts."""

from __future__ import annotations

import os
import signal
import time

import numpy as np


class Shape:
    """Stand-in for `decoder_shapes.Shape` that a process reads without torch."""

    name = "135M"
    sizes = {"num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 30}

    def logits(self) -> dict[int, object]:
        import torch

        return {128: torch.ones(4)}


class Planted:
    """Engine of a child process that crashes as a library does."""

    def __init__(self, *arguments: object, crashes: str = "") -> None:
        self.arguments, self.crashes = arguments, crashes
        self._die("made")

    def _die(self, when: str) -> None:
        if self.crashes == when:
            os.kill(os.getpid(), signal.SIGSEGV)

    def run(self) -> None:
        self._die("run")
        time.sleep(0.001)

    def check(self) -> np.ndarray:
        self._die("check")
        return np.ones(4, np.float32)

    def fails(self) -> None:
        raise ValueError("no such tensor")


def crashes_when_made() -> Planted:
    return Planted(crashes="made")


def crashes_when_run() -> Planted:
    return Planted(crashes="run")


def ends() -> None:
    os._exit(3)


def engine_of_a_shape(shape: object, format: str, flash: bool, *rest: object) -> Planted:
    """Make what `LlamaEngine` is asked for: without flash attention it crashes at the first step."""
    return Planted(crashes="" if flash else "run")


def crashed_engine(*_: object) -> Planted:
    """Make what `LlamaEngine` is asked for: it crashes when it reads the file."""
    return Planted(crashes="made")


def sides_of(name: str, crashes: str) -> list[object]:
    """Make one side, of three copies, that crashes when it is made, when it is checked, or when it is timed."""
    from bench.shared.timing import Side

    engine, calls = Planted(crashes=crashes), [0]

    def run() -> None:
        calls[0] += 1
        if crashes == "later" and calls[0] > 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        engine.run()

    def output() -> object:
        import torch

        return torch.from_numpy(engine.check())

    return [Side(name, run, output, copies=3)]


def rival_sides(case: object, rival: str, weight: np.ndarray, x: np.ndarray) -> list[object]:
    """Make what `linear.rival_sides` is asked for: llama.cpp crashes when it is run, others multiply."""
    import torch

    from bench.shared.timing import Side

    def run() -> object:
        if rival == "llama.cpp":
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.from_numpy(x) @ torch.from_numpy(weight).t()

    return [Side(f"{rival} planted", run, run)]
