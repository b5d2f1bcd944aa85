"""A wheel brings the native kernels: one file for every torch that is served, no compiler where it is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def built(place: Path, **environment: str) -> Path:
    """Build a wheel of a copy of the sources, from the object files that this run has already compiled."""
    for name in PACKED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, place / name)
    shutil.rmtree(place / "infer" / "__pycache__", ignore_errors=True)
    script = (
        "import sys; sys.path.insert(0, '.'); import build_backend; print(build_backend.build_wheel('dist'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=place,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"), INFER_NATIVE="1")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(place)
    return place


def library(installed: Path) -> Path:
    return installed / "infer" / "kernels" / "cpu" / compile_library.LIBRARY


def without_compiler(installed: Path, tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the installed files, where no program can be found."""
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "infer", *command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def test_a_wheel_is_for_one_architecture_and_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"infer-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
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


def test_a_wheel_quantizes_and_runs_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    source = [
        "optimize",
        str(ROOT / "models" / "digits.pt"),
        "--model",
        f"{ROOT / 'models' / 'digits.py'}:build",
    ]
    options = [
        "--quant",
        "int8",
        "--backend",
        "eager",
        "--allow-slower",
        "--batch",
        "1",
        "--output",
        "a.infer",
    ]
    done = without_compiler(installed, tmp_path, *source, *options, "--json")
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert [f["why"] for f in findings if f["what"] == "native layers" and "own kernels" in f["why"]], (
        findings
    )
    assert not list(tmp_path.rglob(compile_library.LIBRARY))  # nothing was compiled into the cache


def test_aot_inductor_says_that_it_needs_a_compiler(installed: Path, tmp_path: Path) -> None:
    done = without_compiler(installed, tmp_path, "optimize", "x.pt", "--backend", "inductor")
    assert done.returncode == 5
    assert "no C++ compiler, which AOTInductor needs to lower" in done.stderr
    assert "Use --backend eager" in done.stderr


def test_a_wheel_without_the_kernels_is_pure(tmp_path: Path) -> None:
    made = built(tmp_path, INFER_NATIVE="0")
    assert made.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]


def test_an_editable_install_needs_no_torch_to_be_built() -> None:
    script = "import build_backend as b; print(b.get_requires_for_build_editable(), b.get_requires_for_build_wheel())"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\[\] \['torch>=[^']*'\]", done.stdout.strip())
