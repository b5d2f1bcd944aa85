"""The native kernels of ARM, compiled by a cross compiler and run in an emulator."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from infer import folders
from infer.kernels.native import build

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
LINEAR = ("dispatch", "pack", "linear_scalar", "linear_neon_dotprod")
ATTEND = (
    "dispatch",
    "linear_scalar",
    "linear_neon_dotprod",
    "attend",
    "attend_scalar",
    "attend_neon_dotprod",
)

pytestmark = pytest.mark.skipif(
    COMPILER is None or EMULATOR is None,
    reason="no aarch64-linux-gnu-g++ or no qemu-aarch64 (apt install g++-aarch64-linux-gnu qemu-user)",
)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every source that is compiled on ARM, by name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(platform, "machine", lambda: "aarch64")
        return build.objects(str(COMPILER), tmp_path_factory.mktemp("arm"), lambda done, total, what: None)


def emulated(
    source: str, objects: dict[str, Path], names: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Runs a program of this folder, linked with those objects; what it was linked into is kept in the cache."""
    path, parts = Path(__file__).with_name(source), [str(objects[name]) for name in names]
    digest = hashlib.sha256("\n".join([path.read_text(), *parts]).encode()).hexdigest()[:16]
    program = folders.cache("kernels") / f"arm-{digest}"
    if not program.exists():
        fresh = program.with_suffix(".tmp")
        command = [str(COMPILER), "-static", "-O1", "-fopenmp", "-std=c++17", f"-I{build.SOURCES}"]
        subprocess.run([*command, str(path), *parts, "-o", str(fresh)], check=True, capture_output=True)
        fresh.replace(program)
    command = [str(EMULATOR), "-cpu", "max", str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_kernel_compiles_for_arm(objects: dict[str, Path]) -> None:
    assert {"linear_neon_dotprod", "attend_neon_dotprod", "conv_scalar", "torch_linear"} <= set(objects)
    assert not any("avx" in name for name in objects)
    machine = b"\xb7\x00"  # EM_AARCH64, at byte 18 of an ELF file
    assert {path.read_bytes()[18:20] for path in objects.values()} == {machine}


def test_linear_kernels_give_the_bits_of_plain_c(objects: dict[str, Path]) -> None:
    done = emulated("native_twins.cpp", objects, LINEAR)
    assert done.returncode == 0, done.stdout


def test_attention_is_that_of_plain_c(objects: dict[str, Path]) -> None:
    done = emulated("attend_twins.cpp", objects, ATTEND)
    assert done.returncode == 0, done.stdout
