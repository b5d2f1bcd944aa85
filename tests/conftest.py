"""For every test: private user folders, seeded numbers, NaN instead of uninitialised memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start inherit it


@pytest.fixture(scope="session", autouse=True)
def private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test reads or writes the caches, or the key, of whoever runs it; compile caches are shared by the run.

    The native library, named by its sources, is kept from one run to the next.
    """
    folder = tmp_path_factory.mktemp("user")
    kept = ROOT / ".pytest_cache" / "kernels"
    kept.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / "kernels").symlink_to(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFER_CACHE", str(folder / "cache"))
        patch.setenv("INFER_CONFIG", str(folder / "config"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture(scope="session", autouse=True)
def unmeasured_memory(private_folders: Path) -> Iterator[None]:
    """Publishing starts a process that measures memory, and takes longer than all else it does for a small model.

    Tests of that process are in test_report_memory; that publishing asks it, in test_pipeline (`measured_memory`).
    """
    from infer import publishing
    from infer.spec import Finding

    def probe(*_: object, **__: object) -> list[Finding]:
        return [Finding("memory", "peak", None, "B", "not measured in this test")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "memory", SimpleNamespace(probe=probe))
        yield


@pytest.fixture
def measured_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer import publishing
    from infer.report import memory

    monkeypatch.setattr(publishing, "memory", memory)


@pytest.fixture(scope="session")
def pydoc_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained language model of models/pydoc_lm, made once; for tests that filter the exporter's warnings."""
    pytest.importorskip("transformers")
    from tests.language_artifacts import pydoc

    return pydoc(tmp_path_factory.mktemp("pydoc"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` comes filled with NaN (or the largest integer): a kernel that reads it is caught."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many tiny operations, which gain nothing from a team of threads and wait for it where others compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Run a piece of Python in a fresh process and return what it prints."""

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
