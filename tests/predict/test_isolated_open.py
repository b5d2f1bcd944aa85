"""A foreign artifact that crashes, hangs or eats its reader costs one process, and the command line says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infer import Predictor
from infer.cli import main
from infer.errors import ArtifactError, ResourceError
from infer.predict import isolated_open
from tests.artifact.test_artifact import make


def crash(*_: object, **__: object) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(*_: object, **__: object) -> None:
    time.sleep(60)


def eat(*_: object, **__: object) -> None:
    _ = bytearray(1 << 30)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an artifact that another user signed; opening it takes no second process where that is not fork()."""
    made = make(tmp_path / "toy.infer")
    monkeypatch.setenv("INFER_CONFIG", str(tmp_path / "other"))
    monkeypatch.setattr(isolated_open.threading, "active_count", lambda: 1)
    return made


@pytest.mark.parametrize(
    ("act", "error", "sentence"),
    [
        (crash, ArtifactError, "opening the artifact ends the process with signal SIGSEGV"),
        (hang, ArtifactError, "opening the artifact takes more than"),
        (eat, ResourceError, "more memory than is free"),
    ],
)
def test_a_crash_while_opening_in_a_subprocess_is_an_error(
    stranger: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[..., None],
    error: type[Exception],
    sentence: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Predictor, "load", act)
    monkeypatch.setattr(isolated_open, "PATIENCE", 0.5)
    monkeypatch.setattr(isolated_open, "memory_available", lambda device: 1 << 28)
    with pytest.raises(error, match=sentence):
        isolated_open.open_in_subprocess(stranger)
    for command in (["verify"], ["predict"], ["generate"], ["bench"]):
        more = {"predict": ["x.npz"], "generate": ["hello"]}.get(command[0], [])
        assert main([*command, str(stranger), *more]) == error("").exit_code  # type: ignore[attr-defined]
        assert sentence in capfd.readouterr().err


def test_an_artifact_of_this_user_or_a_trusted_one_opens_at_once(
    tmp_path: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    isolated_open.open_in_subprocess(stranger, trust_code=True)
    isolated_open.open_in_subprocess(make(tmp_path / "own.infer"))


def test_errors_other_than_crashes_are_left_to_the_opening_process(
    stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolated_open.open_in_subprocess(stranger)
    (stranger / "weights/a.bin").write_bytes(b"changed")
    isolated_open.open_in_subprocess(stranger)
    assert main(["verify", str(stranger)]) == 3
