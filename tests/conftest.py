"""For every test: private user folders, seeded numbers, NaN instead of uninitialised memory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

# Torch's cache of fake tensors takes longer to fill than it spares where a model has one layer: a fifth of an export.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported
os.environ.setdefault("INFER_NATIVE", "all")  # tests compare the instruction sets that users do not compile

import pytest
import torch

from tests.support import durations
from tests.support.cached_libraries import cache_results
from tests.support.clone import main_worktree
from tests.support.lazy_graph_modules import generate_code_lazily

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).parent
LONG = 30.0  # seconds of a file that goes first

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start inherit it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=durations.TIERS,
        default="all",
        help="fast: under two minutes; usual: what `make test` runs; nightly: the rest; all of them by default",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import files that the fast tier leaves out."""
    if config.getoption("--tier") != "fast" or not collection_path.name.startswith("test_"):
        return None
    return True if not durations.is_quick(_name(collection_path), durations.known()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a tier. What takes longest goes first, so that at the end no worker waits for another."""
    functions: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[_name(item.path), item.name.partition("[")[0]].append(item)
    seconds = durations.known()
    kept = set(durations.chosen(functions, config.getoption("--tier"), seconds))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    place = places(list(dict.fromkeys(file for file, _ in functions)), seconds)
    items[:] = sorted((item for item in items if item in kept), key=lambda item: place[_name(item.path)])


def _name(path: Path) -> str:
    return path.relative_to(TESTS).with_suffix("").as_posix()


def places(files: list[str], seconds: durations.Seconds) -> dict[str, float]:
    """Order test files: the longest first, those of servers, which mostly wait, evenly among those that compute."""
    took = {file: seconds.get(file, {}).get("", 0.0) for file in files}
    long = sorted((file for file in files if took[file] >= LONG), key=lambda file: -took[file])
    place = {file: float(index - len(long)) for index, file in enumerate(long)}
    for serving in (True, False):
        group = [file for file in files if file not in place and file.startswith("serve/") is serving]
        place |= {file: (index + 0.5) / len(group) for index, file in enumerate(group)}
    return place


_SHOWN: set[str] = set()  # optional backends of the test that runs


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note the optional backends of a test before its fixtures are made, which may try backends."""
    _SHOWN.clear()
    _SHOWN.update({"openvino"} & {mark.name for mark in item.iter_markers()})


NOTICED = 2e-4  # seconds, of `trial.UNNOTICED`


@pytest.fixture(scope="session")
def of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that the workers of a run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextlib.contextmanager
def alone(folder: Path, name: str) -> Iterator[Path]:
    """Lock a folder of the run that one worker fills while the others wait."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / name).mkdir(exist_ok=True)
        yield folder / name


@pytest.fixture(scope="session", autouse=True)
def private_folders(tmp_path_factory: pytest.TempPathFactory, of_the_run: Path) -> Iterator[Path]:
    """No test reads or writes the caches, or the key, of whoever runs it; the key and what
    inductor compiles are shared by the run.

    The native library, named by its sources, is kept from one run to the next, for all worktrees of a clone.
    """
    from infer import paths

    folder = tmp_path_factory.mktemp("user")
    kept = main_worktree(ROOT) / ".pytest_cache" / "kernels"
    kept.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache" / "kernels").symlink_to(kept)
    (of_the_run / "inductor").mkdir(exist_ok=True)
    (folder / "cache" / "inductor").symlink_to(of_the_run / "inductor")  # of which it locks what it writes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFER_CACHE", str(folder / "cache"))
        patch.setenv(
            "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0"
        )  # code that calls kernels; it compiles faster
        with alone(of_the_run, "config") as config:
            patch.setenv("INFER_CONFIG", str(config))
            paths.signing_key()
        yield folder


@pytest.fixture(scope="session", autouse=True)
def compiled_packages(private_folders: Path, of_the_run: Path) -> Iterator[None]:
    """Compile equal programs once a run: a package takes AOTInductor ten seconds or more."""
    import torch._inductor

    from tests.support.compiled_packages import compile_once

    with pytest.MonkeyPatch.context() as patch:
        compile = torch._inductor.aoti_compile_and_package
        once = compile_once(compile, lambda name: alone(of_the_run, name))
        patch.setattr(torch._inductor, "aoti_compile_and_package", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def unmeasured_memory(private_folders: Path) -> Iterator[None]:
    """Skip the process that measures memory in `optimize` and `bench`: it takes longer than the rest for a small model.

    Tests of that process are in report/test_memory; tests that ask for its figures use `measured_memory`.
    """
    from infer import bench
    from infer.bench import llm
    from infer.report.measurements import memory
    from infer.run import stages

    def probe(*_: object, **__: object) -> memory.Memory:
        return memory.Memory(failure="not measured in this test")

    unmeasured = SimpleNamespace(probe=probe, stored_weights=memory.stored_weights)
    with pytest.MonkeyPatch.context() as patch:
        for module in (bench, llm):
            patch.setattr(module, "memory", unmeasured)
        patch.setattr(
            stages, "ForkingProbe", lambda: SimpleNamespace(probe=probe, start=_nothing, close=_nothing)
        )
        yield


def _nothing(*_: object) -> None:
    return


@pytest.fixture
def noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the unchanged model where a planted time is longer by what a user notices."""
    from infer.run import trial

    monkeypatch.setattr(trial, "UNNOTICED", NOTICED)


@pytest.fixture(scope="session", autouse=True)
def brief_timings() -> Iterator[None]:
    """Time runners and undecided pairs no longer than the fewest calls take, whatever else runs: what `latency` decides
    is tested with a clock of its own, waiting for other processes with processors of its own, and what an unchanged
    model may lose with times of its own.
    """
    from infer.run import trial, trial_timing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_timing, "PAIR_SECONDS", 0.02)
        patch.setattr(trial_timing, "SHORT_SECONDS", 0.02)
        patch.setattr(trial_timing, "BRIEF_SECONDS", 0.005)
        patch.setattr(trial, "UNNOTICED", float("inf"))
        patch.setattr(trial_timing, "MOST_WAITED", 0.0)
        patch.setattr(trial_timing, "MOST_MISSING", float("inf"))
        yield


@pytest.fixture(scope="session", autouse=True)
def hidden_openvino() -> Iterator[None]:
    """Hide OpenVINO from tests without the mark `openvino`: `auto` would try one backend more in each of them."""
    from infer.onnx import packages

    find_spec = packages.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            packages,
            "find_spec",
            lambda name: find_spec(name) if name != "openvino" or "openvino" in _SHOWN else None,
        )
        yield


@pytest.fixture
def measured_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer import bench
    from infer.bench import llm
    from infer.report.measurements import forked_memory, memory
    from infer.run import stages

    for module in (bench, llm):
        monkeypatch.setattr(module, "memory", memory)
    monkeypatch.setattr(stages, "ForkingProbe", forked_memory.ForkingProbe)


@pytest.fixture(scope="session")
def pydoc_artifact(of_the_run: Path) -> Path:
    """Optimize the trained language model of models/pydoc_lm, once; for tests that filter the exporter's warnings."""
    pytest.importorskip("transformers")
    from tests.support.llm_artifacts import pydoc

    with alone(of_the_run, "pydoc") as folder:
        made = folder / "pydoc.infer"
        return made if made.exists() else pydoc(folder)


@pytest.fixture(scope="session")
def tiny_artifact(of_the_run: Path) -> Path:
    """Optimize the random llama of `llm_artifacts.tiny`, without text, once; its source lies beside it."""
    pytest.importorskip("transformers")
    from tests.support.llm_artifacts import tiny

    with alone(of_the_run, "bare") as folder:
        made = folder / "tiny.infer"
        return made if made.exists() else tiny(folder)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` comes filled with NaN (or the largest integer): a kernel that reads it is caught."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # its longer name also imports all of inductor, for seconds
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def cached_libraries() -> None:
    cache_results()
    generate_code_lazily()


@pytest.fixture(scope="module", autouse=True)
def old_objects_aside() -> None:
    """Freeze imported objects, so that the garbage collector does not go through them at every timing."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is frozen is not destroyed at the end, of which triton's bindings complain


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
