"""The backend openvino by its contract: lowered, opened, run, compared with the program it came from."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from backends import openvino
from backends.openvino import compile_trial
from backends.openvino import model as openvino_model
from backends.openvino.layers import LayerConverter
from backends.openvino.model import NumericSettings, clean_error_message
from infer import device
from infer.errors import ArtifactError, NotUsableError
from infer.graph.program import OnnxGraph, TorchGraph
from infer.kernels.ops.linear_packed import lut4_twin
from infer.onnx.rewrite import rewrite
from infer.plan import Plan
from infer.spec import Finding, TensorSpec
from tests.support.onnx_models import Int8Conv, Int8Linear, Lut, graph, lowered, relative_error

pytestmark = pytest.mark.openvino
needs_openvino = pytest.mark.skipif(openvino.missing() is not None, reason=openvino.missing() or "")
needs_vnni = pytest.mark.skipif(not device.has_vnni(), reason="activations stay float without VNNI")
EXACT, INT8_STEP = 1e-4, 0.02  # a tie may round the other way; one rounding of activations to int8


def plan(**changes: Any) -> Plan:
    return Plan(source="x", backend="openvino", device="cpu", dtype="float32").with_(**changes)


def through(
    layers: Sequence[nn.Module], text: str, x: torch.Tensor, folder: Path, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Finding]]:
    """Return the outputs of the runner and of the program, and the findings by name."""
    made = lowered(nn.Sequential(*layers), text, x, folder)
    findings = openvino.lower(made, plan(**changes), folder).findings
    runner = openvino.open(folder, "cpu")
    got = runner.run({made.inputs[0].name: x})
    runner.close()
    assert list(got) == [spec.name for spec in made.outputs]
    want = made.callable()(**{made.inputs[0].name: x})[0]
    return next(iter(got.values())), want, {finding.what: finding for finding in findings}


CLOSED_IN_A_THREAD = """
import os, signal, sys, threading
from pathlib import Path
from backends import openvino
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append(1))
held = [openvino.open(Path(sys.argv[1]), "cpu")]
def close():
    held.pop().close()
thread = threading.Thread(target=close)
thread.start(); thread.join()
os.kill(os.getpid(), signal.SIGINT)
sys.exit(len(caught) - 1)
"""


@needs_openvino
def test_a_signal_is_handled_after_another_thread_closed_a_model(tmp_path: Path) -> None:
    made = lowered(nn.Linear(8, 16), "input=float32[batch,8]", torch.randn(2, 8), tmp_path)
    openvino.lower(made, plan(), tmp_path)
    command = [sys.executable, "-c", CLOSED_IN_A_THREAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@needs_openvino
def test_a_crash_of_the_compiler_is_a_refusal_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crash.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.setattr(compile_trial, "__file__", str(tmp_path / "crash.py"))
    with pytest.raises(
        NotUsableError, match=r"crashes while it reads and compiles this graph \(signal SIGSEGV\)"
    ):
        openvino_model.require_compilable(tmp_path / "m.xml", NumericSettings())


@needs_openvino
def test_openvino_is_imported_without_its_telemetry() -> None:
    code = (
        "import sys; from backends.openvino.library import library; library(); "
        "sys.exit('openvino_telemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@needs_openvino
def test_a_float_model_gives_the_same_numbers_at_other_sizes(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
    made = lowered(module, "input=float32[batch,time,8]", torch.randn(2, 3, 8), tmp_path)
    openvino.lower(made, plan(), tmp_path)
    runner = openvino.open(tmp_path, "cpu")
    for rows, time in ((1, 1), (5, 7), (64, 2), (3, 63)):
        x = torch.randn(rows, time, 8)
        torch.testing.assert_close(runner.run({"input": x})["output"], made.callable()(input=x)[0])
    empty = runner.run({"input": torch.randn(0, 3, 8)})["output"]
    assert empty.shape == (0, 3, 16)
    assert runner.settings == NumericSettings("f32", 0), (
        "the plugin's own choice is bfloat16 where that is fast"
    )


@needs_openvino
def test_nan_stays_in_its_rows_in_openvino(tmp_path: Path) -> None:
    made = lowered(nn.Linear(8, 4), "input=float32[batch,8]", torch.randn(2, 8), tmp_path)
    openvino.lower(made, plan(), tmp_path)
    x = torch.randn(3, 8)
    x[1, 2] = torch.nan
    got = openvino.open(tmp_path, "cpu").run({"input": x})["output"]
    assert got.isnan().all(1).tolist() == [False, True, False]


@needs_openvino
def test_results_of_one_call_survive_the_next_and_strides_are_taken(tmp_path: Path) -> None:
    made = lowered(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4), tmp_path)
    openvino.lower(made, plan(), tmp_path)
    runner = openvino.open(tmp_path, "cpu")
    x = torch.randn(4, 3).T
    first = runner.run({"input": x})["output"]
    runner.run({"input": torch.full((40, 4), 7.0)})
    torch.testing.assert_close(first, made.callable()(input=x)[0])


class Passed(nn.Module):
    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return input.long().int(), input.reshape(-1, 2, 4)


@needs_openvino
def test_inputs_that_come_back_as_outputs_are_never_written_to(tmp_path: Path) -> None:
    made = lowered(Passed(), "input=int32[batch,8]", torch.ones(2, 8, dtype=torch.int32), tmp_path)
    openvino.lower(made, plan(), tmp_path)
    runner = openvino.open(tmp_path, "cpu")
    rows = [torch.randint(0, 99, (count, 8), dtype=torch.int32) for count in [8, 8, 1, 2, 3, 24, 1, 8] * 8]
    before = [row.clone() for row in rows]
    answers = [next(iter(runner.run({"input": row}).values())) for row in rows]
    assert all(map(torch.equal, rows, before))
    assert all(map(torch.equal, answers, before))


@needs_openvino
def test_threads_run_one_model_at_once_with_their_own_results(tmp_path: Path) -> None:
    made = lowered(nn.Linear(64, 64), "input=float32[batch,64]", torch.randn(2, 64), tmp_path)
    openvino.lower(made, plan(), tmp_path)
    runner, wrong = openvino.open(tmp_path, "cpu"), list[int]()

    def call(seed: int) -> None:
        x = torch.randn(seed + 1, 64, generator=torch.Generator().manual_seed(seed))
        want = made.callable()(input=x)[0]
        wrong.extend(
            seed for _ in range(30) if not torch.allclose(runner.run({"input": x})["output"], want, atol=1e-5)
        )

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_openvino
@needs_vnni
def test_openvino_int8_layers_match_our_operator(tmp_path: Path) -> None:
    layer = Int8Linear(torch.randn(48, 1008), bias=torch.randn(48))
    got, want, found = through([layer], "input=float32[batch,1008]", torch.randn(3, 1008), tmp_path)
    assert found["openvino activations in groups of"].value == 1008
    assert found["openvino layers as int8 weights, activations in int8"].value == 1
    assert relative_error(got, want) < EXACT


@needs_openvino
def test_columns_without_a_common_group_are_named_and_computed_in_float(tmp_path: Path) -> None:
    layer = Int8Linear(torch.randn(16, 100))
    got, want, found = through([layer], "input=float32[batch,100]", torch.randn(3, 100), tmp_path)
    if device.has_vnni():
        assert "in float for layers of 100 columns" in found["openvino activations in groups of"].why
    assert relative_error(got, want) < INT8_STEP


class Parallel(nn.Module):
    """Layers of one input; the results side by side."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers])


@needs_openvino
@needs_vnni
@pytest.mark.parametrize("group", [64, 16])
def test_table_layers_stay_packed_and_give_the_numbers_of_the_kernel(tmp_path: Path, group: int) -> None:
    kinds = ((2, 16), (3, 16), (4, 1), (4, 16), (6, 16)) if group == 64 else ((4, 1), (4, 16))
    layers = [Lut(512, 512, bits, tables, group) for bits, tables in kinds]
    x = torch.randn(3, 512)
    got, _, found = through([Parallel(*layers)], "input=float32[batch,512]", x, tmp_path, quant="nf4")
    assert found["openvino activations in groups of"].value == group
    for mine, layer in zip(got, layers, strict=True):
        want = lut4_twin(x, layer.coded())
        assert relative_error(mine, want) < (EXACT if group == 64 else INT8_STEP)
    small = sum(512 * 512 * (1 if bits == 6 else 0.5) for bits, _ in kinds)
    stored = (tmp_path / "compiled/model.bin").stat().st_size
    assert stored < small + sum(layer.scale.numel() + 8_000 for layer in layers)


class Uniform(Lut):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows)
        self.table.copy_(torch.arange(-8, 8)[None] * 0.1)


@needs_openvino
def test_int4_layers_and_rows_stay_four_bits(tmp_path: Path) -> None:
    layers = (Uniform(512, 100), "input=float32[batch,512]", torch.randn(3, 512))
    rows = (Uniform(64, 100), "input=int64[batch,time]", torch.randint(0, 100, (2, 3)))
    for number, (layer, text, x) in enumerate((layers, rows)):
        place = tmp_path / str(number)
        place.mkdir()
        got, want, found = through([layer], text, x, place, quant="int4")
        assert any("int4" in name for name in found)
        assert relative_error(got, want) < (INT8_STEP if x.is_floating_point() else 1e-6)
        assert (place / "compiled/model.bin").stat().st_size < layer.codes.numel() * 1.2


@needs_openvino
@needs_vnni
def test_openvino_convolutions_match_our_operator(tmp_path: Path) -> None:
    kinds = [(kind, groups) for kind in ("", "_weight", "_static") for groups in (1, 4)]
    layers = Parallel(*(Int8Conv(8, 16, kind, groups) for kind, groups in kinds))
    x = torch.randn(2, 8, 9, 7).clamp(-3.8, 3.8)  # the static step clips 128 to 127, the plugin doesn't
    got, want, _ = through([layers], "input=float32[batch,8,9,7]", x, tmp_path)
    for mine, theirs, (kind, _) in zip(got, want, kinds, strict=True):
        assert relative_error(mine, theirs) < (EXACT if kind else INT8_STEP)


@needs_openvino
def test_one_weight_only_layer_keeps_all_activations_float(tmp_path: Path) -> None:
    layers = [Int8Linear(torch.randn(64, 64), "_weight"), Int8Linear(torch.randn(64, 64))]
    got, want, found = through(layers, "input=float32[batch,64]", torch.randn(3, 64), tmp_path)
    assert "weight-only" in found["openvino activations"].why
    assert relative_error(got, want) < INT8_STEP


@needs_openvino
def test_an_onnx_source_is_taken_unquantized(tmp_path: Path) -> None:
    from infer.onnx import export as exporter

    made = graph(nn.Linear(8, 4), "input=float32[batch,8]", torch.randn(2, 8))
    exporter.export(made, tmp_path / "source.onnx", partial(rewrite, rules={}))
    source = OnnxGraph(made.inputs, made.outputs, made.samples, made.sizes, path=tmp_path / "source.onnx")
    (tmp_path / "lowered").mkdir()
    lowered(nn.Linear(8, 4), "input=float32[batch,8]", torch.randn(2, 8), tmp_path / "lowered")
    openvino.lower(source, plan(), tmp_path / "lowered")
    x = torch.randn(3, 8)
    got = openvino.open(tmp_path / "lowered", "cpu").run({"input": x})["output"]
    torch.testing.assert_close(got, made.callable()(input=x)[0])
    assert openvino.refuses(source, plan(quant="int8")) is None
    assert "takes --quant int8, int8:weight, fp16 or none, not nf4" in str(
        openvino.refuses(source, plan(quant="nf4"))
    )


@needs_openvino
@pytest.mark.parametrize("quant", ["int8", "fp16"])
def test_stored_weights_of_an_onnx_source_are_decoded_once(tmp_path: Path, quant: str) -> None:
    from infer.onnx import export as exporter

    layer, x = nn.Conv2d(64, 128, 1), torch.randn(2, 64, 9, 9)
    made = graph(layer, "input=float32[batch,64,9,9]", x)
    exporter.export(made, tmp_path / "source.onnx", partial(rewrite, rules={}))
    source = OnnxGraph(made.inputs, made.outputs, made.samples, made.sizes, path=tmp_path / "source.onnx")
    lowered(layer, "input=float32[batch,64,9,9]", x, tmp_path)  # the signature
    done = openvino.lower(source, plan(quant=quant), tmp_path)
    assert done.coverage is not None
    assert f"are {quant}" in done.coverage.verdict()
    ran = next(one for one in done.findings if one.what == "openvino layers").why
    assert "Convolution" in ran
    assert "Convert" not in ran
    got = openvino.open(tmp_path, "cpu").run({"input": x})["output"]
    assert 0 < relative_error(got, layer(x).detach()) < (INT8_STEP if quant == "int8" else 1e-3)


@needs_openvino
def test_a_damaged_model_is_an_artifact_error(tmp_path: Path) -> None:
    made = lowered(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4), tmp_path)
    openvino.lower(made, plan(), tmp_path)
    path = tmp_path / openvino.MODEL
    path.write_text(path.read_text().replace("MatMul", "NoSuchOperator"))
    with pytest.raises(ArtifactError, match="NoSuchOperator") as error:
        openvino.open(tmp_path, "cpu")
    assert "/openvino/" not in error.value.message, "no source paths of the library"


def test_int8_products_are_refused_on_a_cpu_where_they_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lowered(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4), tmp_path)
    monkeypatch.setattr(device, "has_vnni", lambda: False)
    assert "saturate" in str(openvino.refuses(made, plan(quant="int8:static")))
    (tmp_path / "compiled").mkdir()
    (tmp_path / openvino.SETTINGS).write_bytes(msgspec.json.encode(NumericSettings(vnni=True)))
    with pytest.raises(NotUsableError, match="saturates on a CPU without VNNI"):
        openvino.open(tmp_path, "cpu")


def test_bfloat16_is_refused_on_a_cpu_without_units_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = graph(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4))
    monkeypatch.setattr(device, "has_bfloat16", lambda: False)
    assert "no bfloat16 units" in str(openvino.refuses(made, plan(dtype="bfloat16")))
    monkeypatch.setattr(device, "has_bfloat16", lambda: True)
    assert openvino.refuses(made, plan(dtype="bfloat16")) is None


def test_layers_openvino_cannot_express_are_refused_by_name() -> None:
    made = graph(nn.Linear(4, 4), "input=float32[batch,4]", torch.randn(2, 4))
    assert "CPUs only" in str(openvino.refuses(made, plan(device="cuda")))
    step = TorchGraph(
        (*made.inputs, TensorSpec("kv_cache", "float32", (2, "pages"))), (), {}, program=made.program
    )
    assert "--backend ort, inductor or eager" in str(openvino.refuses(step, plan()))


def test_the_group_of_activations_fits_every_layer() -> None:
    def group(**given: Any) -> int:
        return LayerConverter(**given).group

    assert group(columns={384, 1536}) == 384
    assert group(columns={384, 640}) == 128
    assert group(columns={384, 48}) == 48
    assert group(columns={384, 16}) == 32, "smaller groups cost more than they gain"
    assert group(columns={384}, groups={64}) == 64
    assert group(columns={384}, groups={64, 16}) == 16
    assert group(columns={384}, num_weight_only=1) == 0


def test_openvino_errors_are_cut_to_their_message() -> None:
    raw = "Exception from src/core.cpp:84:\nCheck 'a == b' failed at src/y.cpp:3:\nNo form of Foo\n\n"
    assert clean_error_message(RuntimeError(raw)) == "No form of Foo"
    assert clean_error_message(RuntimeError("")) == "RuntimeError"
