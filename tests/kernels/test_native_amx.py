"""Layers on the tile registers of AMX and with AVX-VNNI, on any CPU with AVX-512.

AMX by a plain C++ twin of the tile instructions, and by the instructions themselves: each is trapped, decoded and done
by the twin. AVX-VNNI by the same instruction in its encoding of AVX-512.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer import device, paths
from infer.kernels import cpu
from infer.kernels.cpu import compile_library
from infer.kernels.cpu.build import TORCH

pytestmark = pytest.mark.skipif(
    "avx512_vnni" not in device.isa() or compile_library.compiler() is None,
    reason="no AVX-512 VNNI or no C++ compiler",
)
HERE = Path(__file__).parent
EMULATED = {"_amx": "-DINFER_AMX_EMULATED", "_avx_vnni": "-DINFER_AVX_VNNI_AS_AVX512"}


def compiled(source: Path, *flags: str) -> Path:
    """Compile a source, kept from run to run; those of the library were compiled with it."""
    key = *flags, *compile_library.built_with(TORCH)
    name = f"{source.stem}-{compile_library.digest(compile_library.included(source), *key)}.o"
    target = paths.cache("kernels") / "objects" / name
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        includes = f"-I{compile_library.SOURCES}", f"-I{TORCH / 'include'}"
        fresh = target.with_suffix(f".{os.getpid()}")
        command = [str(compile_library.compiler()), *compile_library.COMMON, *flags, *includes]
        compile_library.run([*command, "-c", str(source), "-o", str(fresh)])
        fresh.replace(target)
    return target


def run(twins: str, folder: Path, *, emulated: bool) -> str:
    """Link the kernels with a program that compares instruction sets, and return what it prints."""
    cpu.load()
    objects = [compiled(HERE / f"{twins}.cpp")]
    for source, flags in compile_library.sources().items():
        if source.stem.startswith("torch_") or (source.stem == "permission_amx" and not emulated):
            continue
        defined = [EMULATED[end] for end in EMULATED if emulated and source.stem.endswith(end)]
        objects.append(compiled(source, *flags, *defined))
    objects += [] if emulated else [compiled(HERE / "native_amx_trap.cpp")]
    program = folder / twins
    command = [str(compile_library.compiler()), "-fopenmp", *map(str, objects), "-o", str(program)]
    compile_library.run(command)
    # One thread: a team spins for the other on a busy machine.
    done = subprocess.run(
        [program], capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TWINS = ["native_twins", "native_conv_twins", "native_attend_twins"]


@pytest.mark.parametrize("twins", TWINS)
def test_emulated_instructions_compute_what_plain_c_computes(tmp_path: Path, twins: str) -> None:
    checked = run(twins, tmp_path, emulated=True)
    assert "amx_emulated" in checked
    assert "avx_vnni" in checked


@pytest.mark.parametrize("twins", TWINS)
def test_trapped_tile_instructions_compute_what_plain_c_computes(tmp_path: Path, twins: str) -> None:
    assert "checked amx," in run(twins, tmp_path, emulated=False)


def test_fused_layers_on_tiles_have_the_bits_of_avx512() -> None:
    program = [sys.executable, "-m", "tests.support.emulated_tiles"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["encoder", "equal", "decoder", "equal"]
