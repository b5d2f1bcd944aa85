"""Engines for GPUs of other machines (`trt:sm_89`): made, compared and published here, opened there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends import trt
from backends.trt import builder, libraries, lowering, stand_in
from infer import Plan, plugins
from infer import device as hardware
from infer.cli import main
from infer.errors import NotUsableError, UsageError
from infer.reporter import Reporter
from infer.run import stages
from tests.support.onnx_models import Lut, graph, relative_error

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the sentences of machines without CUDA")
MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

def example_inputs():
    return {"input": torch.randn(8, 64, generator=torch.Generator().manual_seed(0))}
"""


@pytest.fixture(scope="module", autouse=True)
def rtx() -> Any:
    """Pretend that TensorRT-RTX 9 is installed; it builds an engine of five bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "module_name", lambda kind: kind if kind == "rtx" else None)
        patch.setattr(libraries, "library_version", lambda kind: "9")
        built = builder.SerializedEngine(b"plan!", Counter())
        patch.setattr(builder, "build", lambda *given: built)
        yield


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "net.py").write_text(MODEL)
    plan = Plan(source=f"{folder / 'net.py'}:build", backend="trt:sm_89", quant="int4", device="cpu")
    made = stages.optimize(plan.with_(trust_code=True), folder / "a.infer", reporter=Reporter())
    return made.path


def test_an_engine_is_published_without_its_gpu(artifact: Path) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["backend"] == "trt:sm_89"
    assert manifest["device"] == "cuda"
    assert manifest["plan"]["device"] == "cpu"
    assert manifest["plan"]["dtype"] == "bfloat16"
    assert manifest["target"] == {"rtx": "9", "sm": "89 120 121"}
    assert (artifact / trt.ENGINE).read_bytes() == b"plan!"
    said = " ".join(manifest["verdict"])
    assert "not timed" in said
    assert "built for compute capability 8.9, 12, 12.1 without a GPU: compared as ONNX Runtime" in said
    assert not list(artifact.rglob("*stand_in*")), "the stand-in is no part of the artifact"


@NO_GPU
def test_an_engine_is_refused_on_a_machine_without_a_gpu(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(artifact)]) == 0
    capsys.readouterr()
    assert main(["bench", str(artifact)]) == 5
    said = capsys.readouterr().err
    assert (
        "built ahead of time for compute capability 8.9, 12, 12.1, and this machine has no CUDA device"
        in said
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rtx": "8"}, "the engine was built for rtx 8, here 9"),
        ({"sm": "80 86"}, "the engine was built for sm 80 86, here 89 120 121"),
    ],
)
def test_another_version_or_gpu_is_refused_when_opened(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(hardware, "fingerprint", lambda device: {"sm": "120", "gpu": "a card"})
    (tmp_path / "compiled").mkdir()
    (tmp_path / "graph.json").write_bytes((artifact / "graph.json").read_bytes())
    made = json.loads((artifact / trt.BUILD_INFO).read_text())
    (tmp_path / trt.BUILD_INFO).write_text(json.dumps(made | changed))
    with pytest.raises(NotUsableError, match=words):
        trt.variant("sm_89").open(tmp_path, "cuda")


def test_capabilities_that_no_engine_serves_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="builds no engines for sm_90. It builds for sm_75, sm_80"):
        plugins.get("backends", "trt:sm_90")


def test_a_format_the_gpu_lacks_is_refused_before_it_is_built() -> None:
    made = graph(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4))
    plan = Plan(source="x", backend="trt:sm_86", device="cpu", dtype="bfloat16", quant="fp8")
    assert "8.6 has no float8" in str(trt.variant("sm_86").refuses(made, plan))
    assert trt.variant("sm_89").refuses(made, plan) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_reference_runner_of_an_engine_computes_in_float32(tmp_path: Path, dtype: str) -> None:
    module = nn.Sequential(Lut(64, 64), nn.LayerNorm(64), nn.Linear(64, 32))
    x = torch.randn(3, 64)
    made = graph(module, "input=float32[batch,64]", x)
    plan = Plan(source="x", backend="trt:sm_89", device="cpu", dtype=dtype, quant="nf4")
    lowering.write_model(made, plan, tmp_path / "model.onnx")
    stand_in.write_float32_model(tmp_path / "model.onnx", tmp_path)
    runner = stand_in.OrtStandIn(tmp_path, made.inputs, made.outputs)
    got = next(iter(runner.run({"input": x}).values()))
    runner.close()
    assert got.dtype == torch.float32
    assert relative_error(got, made.callable()(input=x)[0]) < 2e-2
