"""The native library is compiled once, or absent for a stated reason."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infer import device
from infer.errors import NotUsableError
from infer.kernels import cpu
from infer.kernels.cpu import build, compile_library

SAYS = "from infer.kernels import cpu; print(cpu.why_not())"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(compile_library, "SOURCES", folder)
    return folder


def test_a_library_is_compiled_once(cache: Path, small_sources: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    told: list[str] = []
    first = build.library(lambda done, total, what: told.append(what))
    assert told == ["one.cpp", build.LIBRARY]
    assert build.library(lambda done, total, what: told.append("again")) == first
    assert "again" not in told


def test_processes_that_start_together_wait_for_one_compilation(cache: Path, small_sources: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    told: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: build.library(lambda done, total, what: told.append(what)), range(3)))
    assert len(set(made)) == 1
    assert told == ["one.cpp", build.LIBRARY]


def test_changed_sources_make_another_library(cache: Path, small_sources: Path) -> None:
    before = build.digest()
    (small_sources / "one.cpp").write_text("// changed\n")
    assert build.digest() != before


def test_a_changed_header_compiles_its_includers_again(cache: Path, small_sources: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    folder = small_sources / "sums"
    folder.mkdir()
    (folder / "one.h").write_text("#define ONE 1\n")
    code = '#include "sums/one.h"\nextern "C" __attribute__((visibility("default"))) int two() { return ONE + 1; }'
    (folder / "two.cpp").write_text(code)
    first = build.library()
    assert ctypes.CDLL(str(first)).two() == 2
    (folder / "one.h").write_text("#define ONE 2\n")
    assert ctypes.CDLL(str(build.library())).two() == 3
    assert len(list((cache / "kernels" / "objects").glob("two-*.o"))) == 2
    assert len(list((cache / "kernels" / "objects").glob("one-*.o"))) == 1


def test_sources_have_names_of_their_own() -> None:
    names = [path.name for path in compile_library.SOURCES.rglob("*") if path.is_file()]
    assert len(names) == len(set(names))


def test_sources_that_change_while_compiled_make_no_stale_library(
    cache: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    run, source = compile_library.run, small_sources / "one.cpp"
    code = 'extern "C" __attribute__((visibility("default"))) int one() { return %d; }'
    source.write_text(code % 1)

    def change_and_run(command: list[str]) -> str:
        source.write_text(code % 2)
        return run(command)

    monkeypatch.setattr(compile_library, "run", change_and_run)
    before = build.library()
    assert ctypes.CDLL(str(before)).one() == 1
    after = build.library()
    assert after != before
    assert ctypes.CDLL(str(after)).one() == 2


def test_a_compiler_failure_is_quoted_and_leaves_no_file(cache: Path, small_sources: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    (small_sources / "one.cpp").write_text("this is not C++\n")
    with pytest.raises(NotUsableError, match="can't compile the native kernels: .*error"):
        build.library()
    assert [path.name for path in (cache / "kernels").rglob("*") if path.is_file()] == ["lock"]


def test_without_a_compiler_the_message_says_what_to_install(
    cache: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(NotUsableError, match="no C\\+\\+ compiler"):
        build.library()


def test_a_library_of_a_wheel_is_used_without_a_compiler(
    cache: Path, small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "installed.so")
    build.PREBUILT.touch()
    assert build.compiled()
    assert build.library() == build.PREBUILT


def test_a_compiled_graph_depends_on_the_sources_not_on_the_compiler(
    small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, library = compile_library.source_digest(), build.digest()
    monkeypatch.setattr(compile_library, "compiler", lambda: "/opt/another/c++")
    assert compile_library.source_digest() == graph
    assert build.digest() != library


def test_native_kernels_can_be_disabled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS], env={"INFER_NATIVE": "0", "PATH": ""}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "switched off by INFER_NATIVE=0"


@pytest.mark.parametrize("path", sorted(compile_library.SOURCES.rglob("*.cpp")), ids=lambda p: p.name)
def test_instruction_sets_are_named_by_the_file(path: Path) -> None:
    flags = compile_library.sources().get(path)
    assert flags is not None or path.stem.endswith(tuple(compile_library.SUFFIXES))


@pytest.mark.parametrize(
    ("has", "architecture", "best"),
    [
        (("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni"), "x86_64", "_avx512_vnni"),
        (("avx2", "fma", "avx_vnni"), "x86_64", "_avx_vnni"),
        (("avx2", "fma"), "x86_64", "_avx2"),
        (("neon", "dotprod"), "aarch64", "_neon_dotprod"),
        (("neon",), "aarch64", "_scalar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_first_use_compiles_the_best_set_of_the_cpu(
    has: tuple[str, ...], architecture: str, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFER_NATIVE", raising=False)
    monkeypatch.setattr(device, "isa", lambda: has)
    chosen = compile_library.sources(architecture, sets=build.sets())
    assert any(path.stem == f"linear{best}" for path in chosen)
    scalar = [path for path in chosen if path.stem.endswith("_scalar")]
    assert bool(scalar) == (best == "_scalar")
    assert len(chosen) < len(compile_library.sources(architecture))
    monkeypatch.setenv("INFER_NATIVE", "all")
    assert build.sets() is None


def test_the_library_of_first_use_offers_no_other_set() -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    everything = cpu.isas()  # its object files are those of the other library too
    says = "from infer.kernels import cpu; print(*cpu.isas(), cpu.isa())"
    variables = {name: value for name, value in os.environ.items() if name != "INFER_NATIVE"}
    done = subprocess.run([sys.executable, "-c", says], env=variables, capture_output=True, text=True)
    *own, used = done.stdout.split()
    assert used == own[0] == everything[0], done.stderr
    assert own == everything[: len(own)]
    assert len(own) < len(everything) or everything == ["scalar"]


def test_a_library_without_a_set_of_this_cpu_is_refused() -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    foreign = "'avx2', 'fma'" if "dotprod" in device.isa() else "'dotprod'"
    says = f"from infer import device; device.isa = lambda: ({foreign},); {SAYS}"
    variables = {name: value for name, value in os.environ.items() if name != "INFER_NATIVE"}
    done = subprocess.run([sys.executable, "-c", says], env=variables, capture_output=True, text=True)
    assert done.stdout.strip().endswith("has no instruction set of this CPU"), done.stderr
