"""A wheel brings the native kernels: one file for every torch that is served, no compiler where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infer.kernels import cpu
from infer.kernels.cpu import compile_library

ROOT = Path(__file__).resolve().parents[1]
PACKED = ("infer", "backends", "pyproject.toml", "build_backend.py", "MANIFEST.in", "README.md", "LICENSE")
LARGEST = 6_000_000  # bytes
# The functions of torch's C ABI that the kernels call; each is in libtorch_cpu since torch 2.11.
SINCE_2_11 = """
aoti_torch_abi_version aoti_torch_delete_library_object aoti_torch_delete_tensor_object aoti_torch_device_type_cpu
aoti_torch_dtype_bfloat16 aoti_torch_dtype_bool aoti_torch_dtype_float16 aoti_torch_dtype_float32 aoti_torch_dtype_int32
aoti_torch_dtype_int64 aoti_torch_dtype_int8 aoti_torch_dtype_uint8 aoti_torch_empty_strided aoti_torch_get_data_ptr
aoti_torch_get_dim aoti_torch_get_dtype aoti_torch_get_numel aoti_torch_get_sizes aoti_torch_get_strides
aoti_torch_is_contiguous aoti_torch_library_init_impl aoti_torch_memory_format_contiguous_format
aoti_torch_new_tensor_handle torch_call_dispatcher torch_delete_list torch_library_impl torch_list_get_item
torch_list_size
""".split()  # noqa: SIM905 - a word is a function

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or compile_library.compiler() is None,
    reason="wheels are built on Linux with a compiler",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    for name in PACKED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, place / name)
    return place


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """Build a wheel from the object files that this run has already compiled."""
    return sources / "dist" / in_build(sources, "print(b.build_wheel('dist'))", INFER_NATIVE="1")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(place)
    return place


def library(installed: Path) -> Path:
    return installed / "infer" / "kernels" / "cpu" / compile_library.LIBRARY


def in_build(folder: Path, script: str, **environment: str) -> str:
    """Return the last line that a script prints after it has imported the build backend in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import build_backend as b; {script}"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_a_wheel_is_for_one_architecture_and_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"infer_engine-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == [
        f"infer/kernels/cpu/{compile_library.LIBRARY}"
    ]
    assert not [name for name in names if name.startswith(("tests", "build_backend"))]


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (apt install binutils)")
def test_a_wheel_calls_only_the_c_functions_of_torch_2_11(installed: Path) -> None:
    command = ["nm", "--dynamic", "--undefined-only", str(library(installed))]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    undefined = {line.split()[-1] for line in listed.splitlines()}
    assert [name for name in undefined if re.match(r"_ZN?K?(2at|3c10|5torch)", name)] == []
    assert {name for name in undefined if name.startswith(("aoti_", "torch_"))} <= set(SINCE_2_11)


COMPUTES = """
import torch
from infer import plugins
from infer.kernels import cpu
x, codes, scale = torch.randn(3, 64), torch.randint(-127, 128, (16, 64), dtype=torch.int8), torch.rand(16)
made = torch.ops.infer.linear_int8_packed(x, *cpu.pack_int8(codes, scale), None, None, 16, 64)
wanted = x @ (codes * scale[:, None]).T
print(float((made - wanted).norm() / wanted.norm()), cpu.isa(), plugins.why_not("backends", "inductor"), sep="|")
"""


def test_a_wheel_computes_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTES], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    error, isa, inductor = done.stdout.strip().split("|")
    assert float(error) < 0.02
    assert isa in cpu.isas()
    assert inductor == "no C++ compiler, which AOTInductor needs to lower (install g++, or set CXX)"
    assert not list(tmp_path.rglob(compile_library.LIBRARY))  # nothing was compiled into the cache


def test_only_a_wheel_with_kernels_needs_torch_to_be_built(sources: Path) -> None:
    asked = "print(b.get_requires_for_build_editable(), b.get_requires_for_build_wheel())"
    assert re.fullmatch(r"\[\] \['torch>=[^']*'\]", in_build(sources, asked))
    assert in_build(sources, asked, INFER_NATIVE="0") == "[] []"
