"""A hundred mutated artifacts: none hangs, crashes or ends in a traceback; `make fuzz` goes on for minutes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import artifacts
from tests.fuzz.artifacts import Case, judge
from tests.support import mutations

ROOT = Path(__file__).resolve().parents[2]


def test_a_hundred_mutated_artifacts_are_refused_or_open() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.artifacts", "120", "6", "11", "--quick"],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(done.stdout.rpartition(" mutated artifacts")[0].split()[-1]) >= 40


@pytest.mark.parametrize(
    ("code", "said", "outcome"),
    [
        (0, "fine", "opened"),
        (3, "infer: it is damaged", "refused, exit 3"),
        (3, "Traceback (most recent call last)", "! traceback"),
        (1, "infer: internal error, a bug in infer", "! traceback"),
        (1, "infer: something", "! exit 1"),
        (3, "infer: \x1b[2J", "! control characters"),
        (0, "EP Error", "! a library spoke"),
        (3, "", "! no sentence"),
    ],
)
def test_exit_codes_and_output_classify_an_outcome(code: int, said: str, outcome: str) -> None:
    assert judge(code, said) == outcome


def crash(folder: Path, trust: bool) -> int:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def hang(folder: Path, trust: bool) -> int:
    import time

    time.sleep(60)
    return 0


def eat(folder: Path, trust: bool) -> int:
    return len(bytearray(16 << 30))


@pytest.mark.parametrize(
    ("action", "outcome"),
    [(crash, "! ended by SIGSEGV"), (hang, "! hung for 1 s"), (eat, "! traceback")],
)
def test_crashes_hangs_and_memory_bombs_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: object, outcome: str
) -> None:
    base = tmp_path / "bases/toy.infer"
    base.mkdir(parents=True)
    (base / "manifest.json").write_text('{"files": {}}')
    monkeypatch.setitem(artifacts.ACTIONS, "planted", action)  # type: ignore[arg-type]
    monkeypatch.setattr(artifacts, "PATIENCE", 1.0)
    case = Case("toy.infer", "manifest.json", "planted", 1)
    found = artifacts.run_batch([case], tmp_path / "bases", tmp_path)
    assert [what for _, what, _ in found] == [outcome]


@pytest.mark.parametrize("name", ["a.json", "a.safetensors", "model.onnx", "graph.pt2", "a.jinja"])
def test_mutations_change_most_files_and_are_seeded(name: str) -> None:
    data = {"a.json": b'{"a": [1, {"b": "c"}]}', "a.safetensors": (2).to_bytes(8, "little") + b"{}"}.get(
        name, b"x" * 99
    )
    mutate = mutations.mutation_for(name)
    made = [mutate(data, random.Random(seed)) for seed in range(50)]
    assert made == [mutate(data, random.Random(seed)) for seed in range(50)]
    assert sum(one != data for one in made) > 30
