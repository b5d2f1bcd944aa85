"""For every test: private user folders, seeded numbers, NaN instead of uninitialised memory."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

# Torch's cache of fake tensors takes longer to fill than it spares where a model has one layer: a fifth of an export.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

import pytest
import torch

from tests.support.cached_libraries import cache_results
from tests.support.clone import main_worktree
from tests.support.lazy_graph_modules import generate_code_lazily

ROOT = Path(__file__).resolve().parent.parent
# What takes longest goes first, so that at the end no worker waits for another: `make test` keeps this order.
LONGEST = """
run/test_backends_and_formats test_readme_commands test_tutorials kernels/test_fused_decoder_layers
kernels/test_native_arm kernels/test_triton_interpreter cli/test_generate serve/llm/test_trained_llm
predict/test_text_generation backends/test_inductor_steps backends/ort/test_ort_steps llm/test_encoder_decoder
artifact/test_mutated_artifacts llm/test_paged_step predict/test_task_answers budget_search/test_isolation
backends/ort/test_table_layers llm/test_lora_variants artifact/test_stored_data run/test_every_source
llm/test_static_cache_rival kernels/test_native_amx llm/test_state_artifact backends/ort/test_ort_encoder_decoders
run/test_mixed_precision run/test_typed_data serve/llm/test_lora llm/test_random_schedules test_models
llm/test_latent_attention backends/trt/test_trt kernels/test_fused_encoder_layers compress/test_recurrent
serve/http/test_openapi cli/test_cli serve/test_page serve/workers/test_workers serve/test_chaos
serve/http/test_bad_requests serve/test_end_to_end gate/test_planted_faults
""".split()  # noqa: SIM905 - a word is a file
TESTS = Path(__file__).parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start inherit it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {item: item.path.relative_to(TESTS).with_suffix("").as_posix() for item in items}
    place = places(list(dict.fromkeys(names.values())))
    items.sort(key=lambda item: place[names[item]])


def places(names: list[str]) -> dict[str, float]:
    """Order test files: the longest first, those of servers, which mostly wait, evenly among those that compute."""
    place = {name: float(LONGEST.index(name) - len(LONGEST)) for name in names if name in LONGEST}
    for serving in (True, False):
        group = [name for name in names if name not in place and name.startswith("serve/") is serving]
        place |= {name: (index + 0.5) / len(group) for index, name in enumerate(group)}
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
        patch.setenv("HF_HUB_OFFLINE", "1")
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
