"""Packages for a GPU that is described, not present: how they are read, and one compiled where torch has CUDA."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch

from backends import inductor
from bench.gpu import cuda_compile, described_device
from bench.gpu.cuda_compile import Row, examine
from bench.shared.repository import RESULTS

GPU_CODE = "call_triton_poi_fused_relu_0(buf0, stream, this->device_idx_);"


def package(folder: Path, device: str, code: str, sm: int | None) -> Path:
    """Write what AOTInductor packs: metadata, C++, machine code with its architecture in the ELF header, library."""
    path = folder / "model.pt2"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr(
            "m/data/aotinductor/model/a.wrapper_metadata.json", json.dumps({"AOTI_DEVICE_KEY": device})
        )
        files.writestr("m/data/aotinductor/model/a.wrapper.cpp", code)
        files.writestr("m/data/aotinductor/model/a.wrapper.so", b"\x7fELF")
        if sm:
            files.writestr("m/data/aotinductor/model/k.cubin", b"\x7fELF" + bytes(44) + bytes((4, sm, 0, 10)))
    return path


def test_a_package_compiled_for_the_gpu_passes_inspection(tmp_path: Path) -> None:
    row = Row(model="net", quant="none")
    examine(package(tmp_path, "cuda", GPU_CODE, 90), row)
    assert (row.outcome, row.findings, row.device, row.cubins) == ("built", [], "cuda", {"sm_90": 1})


@pytest.mark.parametrize(
    ("device", "code", "sm", "said"),
    [
        ("cpu", GPU_CODE, 90, "the package is for cpu"),
        ("cuda", GPU_CODE, None, "machine code for nothing, not sm_90"),
        ("cuda", GPU_CODE, 80, "machine code for ['sm_80'], not sm_90"),
        ("cuda", GPU_CODE + " cpp_fused_add_0(buf1);", 90, "a kernel of the CPU: cpp_fused_add_0("),
        (
            "cuda",
            GPU_CODE + " aoti_torch_cpu_mm_out(a, b);",
            90,
            "an operator of the CPU: aoti_torch_cpu_mm_out(",
        ),
    ],
)
def test_cpu_code_in_a_gpu_package_is_reported(
    tmp_path: Path, device: str, code: str, sm: int | None, said: str
) -> None:
    row = Row(model="net", quant="none")
    examine(package(tmp_path, device, code, sm), row)
    assert row.outcome == "failed"
    assert said in row.findings


def test_without_cuda_in_torch_the_reason_is_given() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert "built without CUDA" in str(described_device.missing())


def test_a_missing_header_is_named_with_its_remedy() -> None:
    output = "CppCompileError: C++ compile error\n\nOutput:\na.h:15:10: fatal error: cuda.h: No such file or directory"
    refused = inductor._refusal(RuntimeError(output))
    assert str(refused).startswith("inductor can't compile this graph: the C++ compiler does not find cuda.h")
    assert "CUDA_HOME" in str(refused)
    assert "C++ compile error" in str(inductor._refusal(RuntimeError("C++ compile error\nmore")))


@pytest.mark.skipif(described_device.missing() is not None, reason=str(described_device.missing()))
def test_the_classifier_compiles_for_a_described_gpu(tmp_path: Path) -> None:
    row = Row(model="digits", quant="none")
    cuda_compile.fill(row)
    assert (row.outcome, row.findings) == ("built", [])


def test_every_row_of_the_newest_cuda_compile_table_is_built() -> None:
    path = sorted(RESULTS.glob("cuda-compile-*.json"))[-1]
    rows = msgspec.convert(json.loads(path.read_bytes())["rows"], list[Row])
    assert {(row.model, row.quant) for row in rows} >= {
        (model, quant) for model, quants in cuda_compile.QUANTS.items() for quant in quants
    }
    for row in rows:
        assert (row.outcome, row.device, row.findings) == ("built", "cuda", []), row
    called = {(row.model, row.quant): row.operators for row in rows}
    assert "infer::linear_lut4_fragments" in called["step", "nf4"]
