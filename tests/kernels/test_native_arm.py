"""The kernels as they are built for ARM: they link, and under an emulator they compute what plain C++ computes."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infer import paths
from infer.kernels.cpu import compile_library
from infer.kernels.cpu.build import TORCH
from tests.support import arm_library
from tests.support.arm_library import COMPILER, EMULATOR, NAMES

pytestmark = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in (COMPILER, NAMES, EMULATOR)),
    reason=f"no {COMPILER} or no {EMULATOR} (apt install g++-aarch64-linux-gnu qemu-user)",
)


def compiled(source: Path, *flags: str) -> Path:
    """Compile a source for ARM, kept from run to run."""
    folder = paths.cache("kernels") / "objects"
    folder.mkdir(exist_ok=True)
    key = COMPILER, *flags, *compile_library.built_with(TORCH)
    target = folder / f"arm-{source.stem}-{compile_library.digest(compile_library.included(source), *key)}.o"
    if not target.exists():
        includes = f"-I{compile_library.SOURCES}", f"-I{TORCH / 'include'}"
        fresh = target.with_suffix(".tmp")
        command = [COMPILER, *compile_library.COMMON, *flags, *includes, "-c", str(source), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True)
        fresh.replace(target)
    return target


def link_only(source: Path) -> list[str]:
    """Return the flags of a source that is linked and never run: unoptimized, it compiles in half the time."""
    return ["-O0"] * source.stem.startswith("torch_")


@pytest.fixture(scope="module")
def objects() -> dict[str, Path]:
    """Source name → object file, of every source that an ARM machine compiles."""
    sources = compile_library.sources("aarch64")
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda source: compiled(source, *sources[source], *link_only(source)), sources)
        return {source.stem: path for source, path in zip(sources, made, strict=True)}


def linked(objects: list[Path], program: Path, *flags: str) -> Path:
    command = [COMPILER, *flags, "-fopenmp", *map(str, objects), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    return program


def test_the_library_lacks_nothing_but_torch(objects: dict[str, Path], tmp_path: Path) -> None:
    library = linked(list(objects.values()), tmp_path / compile_library.LIBRARY, "-shared")
    assert [name for name in arm_library.undefined(library) if "infer" in name] == []
    assert {"linear_neon_dotprod", "attend_neon_dotprod", "conv_neon_dotprod"} <= set(objects)
    assert arm_library.load(library, tmp_path) == ["neon_dotprod", "scalar"]


def test_a_library_that_lacks_a_symbol_does_not_load(tmp_path: Path) -> None:
    source, library = tmp_path / "lacks.cpp", tmp_path / "lacks.so"
    source.write_text('extern "C" { void absent(); const char* infer_isas() { absent(); return "none"; } }')
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(RuntimeError, match="undefined symbol: absent"):
        arm_library.load(library, tmp_path)


TWINS = ["native_twins", "native_conv_twins", "native_attend_twins", "native_rows_twins"]


@pytest.mark.parametrize("twins", TWINS)
def test_arm_computes_what_plain_c_computes(objects: dict[str, Path], tmp_path: Path, twins: str) -> None:
    own = [path for name, path in objects.items() if not name.startswith("torch_")]
    program = linked([compiled(Path(__file__).with_name(f"{twins}.cpp")), *own], tmp_path / twins, "-static")
    done = subprocess.run(
        [EMULATOR, "-cpu", "max", str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
