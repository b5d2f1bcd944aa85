"""Choice between TensorRT and TensorRT-RTX, and what each says about itself; needs neither."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends import trt
from backends.trt import builder as trt_builder
from backends.trt import libraries
from infer import device as hardware
from infer import plugins
from infer.errors import NotUsableError, UsageError
from infer.onnx import ort_session
from infer.plan import Plan
from infer.report import inspection


def have(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Pretend that these libraries are installed, in version 9."""
    monkeypatch.setattr(libraries, "module_name", lambda kind: kind if kind in kinds else None)
    monkeypatch.setattr(libraries, "library_version", lambda kind: "9")


def on_gpu(monkeypatch: pytest.MonkeyPatch, sm: str) -> None:
    monkeypatch.setattr(hardware, "fingerprint", lambda device: {"sm": sm, "gpu": "a card"})


@pytest.mark.parametrize(
    ("installed", "option", "library"),
    [
        ((), "", "tensorrt"),
        (("tensorrt",), "", "tensorrt"),
        (("rtx",), "", "rtx"),
        (("tensorrt", "rtx"), "", "tensorrt"),
        (("tensorrt", "rtx"), "rtx", "rtx"),
    ],
)
def test_the_library_is_the_installed_or_the_named_one(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], option: str, library: str
) -> None:
    have(monkeypatch, *installed)
    assert plugins.get("backends", f"trt:{option}" if option else "trt").target.__self__.library == library


def test_unknown_options_of_a_backend_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"backend trt has no option 'lite'. Known: trt, trt:rtx"):
        plugins.get("backends", "trt:lite")
    with pytest.raises(UsageError, match=r"backend eager has no options, got 'eager:rtx'"):
        plugins.get("backends", "eager:rtx")


def test_missing_names_the_package_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert trt.missing() == "TensorRT is not installed (pip install 'infer-engine[gpu]')"
    assert trt.variant("rtx").missing() == "TensorRT-RTX is not installed (pip install 'infer-engine[rtx]')"


@pytest.mark.parametrize(
    ("sm", "group"),
    [("75", "75"), ("80", "80 86"), ("89", "89 120 121"), ("120", "89 120 121"), ("90", "90")],
)
def test_an_rtx_engine_is_tied_to_a_group_of_gpus(
    monkeypatch: pytest.MonkeyPatch, sm: str, group: str
) -> None:
    have(monkeypatch, "rtx")
    on_gpu(monkeypatch, sm)
    assert trt.target("cuda") == {"rtx": "9", "sm": group}
    plan = Plan(source="x", backend="trt:rtx", device="cuda", dtype="float16")
    reason = trt._uncovered(plan, "rtx")
    assert (reason is None) is (sm != "90")
    assert reason is None or reason.startswith(
        "TensorRT-RTX builds for SM 75, 80, 86, 89, 120, 121, this GPU is SM 90"
    )


@pytest.mark.parametrize(
    ("sm", "quant", "dtype", "words"),
    [
        (
            "75",
            "none",
            "bfloat16",
            "compute capability 7.5 has no bfloat16 (it came with 8): use --dtype fp16",
        ),
        (
            "75",
            "int4",
            "float32",
            "TensorRT-RTX multiplies no float32 on compute capability 7.5: use --dtype fp16",
        ),
        ("75", "int8:static", "float16", None),
        (
            "86",
            "fp8",
            "bfloat16",
            "compute capability 8.6 has no float8 (it came with 8.9): use --quant int8:static",
        ),
        ("89", "fp8", "bfloat16", None),
        ("120", "none", "tf32", None),
    ],
)
def test_formats_older_gpus_lack_are_refused_by_name(
    sm: str, quant: str, dtype: str, words: str | None
) -> None:
    assert libraries.lacking([sm], quant, dtype) == words


def test_engines_are_refused_without_their_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    have(monkeypatch, "tensorrt")
    on_gpu(monkeypatch, "89")
    (tmp_path / "compiled").mkdir()
    (tmp_path / trt.BUILD_INFO).write_text(json.dumps({"rtx": "9", "sm": "89 120 121"}))
    with pytest.raises(NotUsableError, match=r"built by TensorRT-RTX: TensorRT-RTX is not installed"):
        trt.open(tmp_path, "cuda")


def test_doctor_tells_both_libraries_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "rtx")
    rows = {row.what: row for row in inspection.doctor() if row.stage == "tensorrt"}
    assert (rows["TensorRT"].value, rows["TensorRT"].why) == (
        "no",
        "TensorRT is not installed (pip install 'infer-engine[gpu]')",
    )
    assert rows["TensorRT-RTX"].value == "9"
    assert "compute capability 7.5, 8, 8.6, 8.9, 12, 12.1" in rows["TensorRT-RTX"].why


@pytest.mark.parametrize("tf32", [False, True])
def test_float32_engines_have_no_tf32_unless_asked(tf32: bool) -> None:
    cleared: list[str] = []
    config = SimpleNamespace(clear_flag=cleared.append)
    library: Any = SimpleNamespace(
        ProfilingVerbosity=SimpleNamespace(DETAILED=1), BuilderFlag=SimpleNamespace(TF32="tf32")
    )
    builder = SimpleNamespace(create_builder_config=lambda: config)
    options = trt_builder.BuildOptions(libraries.RTX, None, (), tf32)
    trt_builder._config(library, builder, {}, options)
    assert cleared == ([] if tf32 else ["tf32"])


def test_onnx_runtime_has_no_tf32_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    assert ort_session.providers("cuda")[0][1]["use_tf32"] == "0"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert ort_session.providers("cuda")[0][1]["use_tf32"] == "1"


def test_convolutions_have_no_tf32_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    hardware.use_tf32("float32", "cpu")
    assert torch.backends.cudnn.allow_tf32 is True
    hardware.use_tf32("float32", "cuda")
    assert torch.backends.cudnn.allow_tf32 is False
    hardware.use_tf32("tf32", "cuda")
    assert torch.backends.cudnn.allow_tf32 is True
    assert chosen == ["high"]
