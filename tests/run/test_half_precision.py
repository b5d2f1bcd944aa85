"""bfloat16 beside float32 with `--dtype auto`: when it is tried, by which limits it is judged, when it is published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends import openvino
from infer import device, optimize
from infer.errors import NotUsableError
from infer.fidelity.thresholds import LIMITS
from infer.graph.program import OnnxGraph, TorchGraph
from infer.latency import Paired, Timing, summarize, verdict
from infer.plan import Plan
from infer.reporter import Reporter
from infer.results import Metric
from infer.run import half_precision
from infer.run.float_reference import EAGER, FloatReferences
from infer.run.half_precision import DTYPE, HalfPrecision, chosen_dtype, try_half
from infer.run.resolve_plan import Resolved
from infer.run.select import PAYS, choose
from infer.run.trial import Trial
from infer.run.try_backends import Compressed, Trials
from infer.spec import Choice

PLAN = Plan(source="x", backend="auto", quant="none", dtype="float32", device="cpu", batches=(1,))
AUTO = Choice("dtype", "auto", "float32", "as exact as the original")
PROGRAM: Any = object()
GRAPH = TorchGraph((), (), {}, program=PROGRAM)


def trial(backend: str, seconds: float, dtype: str = "", error: float = 0.0, form: float = 1.0) -> Trial:
    ratio = seconds / form
    pair = Paired(ratio, ratio, ratio, verdict(ratio, ratio), 11, summarize([seconds]), summarize([form]))
    made = Trial(backend, Path(), [Metric("y", "relative_error", error)], {}, 1, 1, changed=bool(dtype))
    made.dtype, made.forms, made.baseline = dtype, {EAGER: {1: form}}, EAGER
    made.latency = [Timing(1, pair, EAGER)]
    return made


def trials(*given: Trial) -> Trials:
    floats = FloatReferences(GRAPH, Path())
    return Trials(PLAN, GRAPH, Compressed(GRAPH, None), Path(), floats, Reporter(), list(given))


TRIED, NO_CHOICE = HalfPrecision(is_tried=True), HalfPrecision()


def choice(plan: Plan = PLAN, task: str = "tensors", graph: Any = GRAPH) -> HalfPrecision:
    loaded, in_memory = SimpleNamespace(task=task), isinstance(graph, TorchGraph)
    original: Any = SimpleNamespace(graph=graph, loaded=loaded, is_in_memory=in_memory)
    return half_precision.choice(Resolved(plan, (AUTO,)), original)


def refusal(plan: Plan = PLAN, task: str = "tensors", graph: Any = GRAPH) -> str:
    made = choice(plan, task, graph)
    assert made.is_tried is not bool(made.refused)
    return made.refused


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_bfloat16", lambda: True)


def test_bfloat16_is_published_where_it_pays() -> None:
    tried = trials(trial("ort", 1.0), trial("openvino", 0.5, DTYPE, error=0.02))
    selected = choose(tried)
    assert (selected.trial.backend, selected.trial.dtype) == ("openvino", DTYPE)
    assert selected.choice.reason == "the fastest here; time of the others: ort 2.00x"
    rows = {row.name: row for row in selected.backends}
    assert rows["openvino bfloat16"].outcome == "chosen"
    assert rows["ort"].why.startswith("2.00x the time of openvino bfloat16")
    run = chosen_dtype(Resolved(PLAN, (AUTO,)), selected, TRIED)
    assert run.plan.dtype == DTYPE
    why = "2.00x the speed of torch eager, and within the limits of bfloat16"
    assert run.choices == (Choice("dtype", "auto", DTYPE, why),)


@pytest.mark.parametrize("half", [1.01 / PAYS, 1.0, 1.5], ids=["below the bar", "same", "slower"])
def test_bfloat16_that_gains_too_little_is_not_published(half: float) -> None:
    selected = choose(trials(trial("ort", 1.0), trial("openvino", half, DTYPE)))
    assert (selected.trial.backend, selected.trial.dtype) == ("ort", "")
    run = chosen_dtype(Resolved(PLAN, (AUTO,)), selected, TRIED)
    assert run.plan.dtype == "float32"
    assert f"openvino bfloat16 is {1 / half:.2f}x as fast" in run.choices[0].reason


def test_bfloat16_is_judged_by_its_own_limits() -> None:
    allowed = LIMITS[DTYPE].relative_error or 0.0
    inside, outside = (trial("openvino", 0.5, DTYPE, error=factor * allowed) for factor in (0.99, 1.01))
    assert choose(trials(trial("ort", 1.0), inside)).trial is inside
    selected = choose(trials(trial("ort", 1.0), outside))
    assert selected.trial.backend == "ort"
    assert "openvino bfloat16 is not faithful enough: y.relative_error" in selected.dtype


def test_a_float32_error_is_not_excused_by_the_limits_of_bfloat16() -> None:
    wrong = trial("ort", 0.5, error=0.02)
    assert choose(trials(wrong, trial("eager", 1.0))).trial.backend == "eager"


def test_a_requested_dtype_backend_or_format_keeps_its_dtype(units: None) -> None:
    assert choice() == TRIED
    assert half_precision.choice(Resolved(PLAN, ()), SimpleNamespace()) == NO_CHOICE  # type: ignore[arg-type]
    assert refusal(PLAN.with_(backend="inductor")) == "bfloat16 is tried with --backend auto only"
    assert refusal(PLAN.with_(quant="int8")) == "float layers beside quantized ones keep float32"
    assert refusal(task="text-generation") == "--dtype bf16 changes the KV cache of a language model, too"
    assert refusal(graph=OnnxGraph((), (), {}, path=Path("model.onnx")))
    assert refusal(PLAN.with_(batches=()))


def test_bfloat16_is_not_tried_on_cpus_without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_bfloat16", lambda: False)
    assert choice() == NO_CHOICE


def test_calls_too_short_to_gain_are_left_in_float32() -> None:
    tried = trials(trial("ort", half_precision.LEAST_SECONDS / 2))
    try_half(tried, lambda plan: pytest.fail("captured although nothing is to be gained"))
    assert [(row.name, row.outcome) for row in tried.refused] == [(DTYPE, "refused")]
    run = chosen_dtype(Resolved(PLAN, (AUTO,)), choose(tried), TRIED)
    assert "calls of 2.50 ms are too short to gain by it" in run.choices[0].reason


def test_a_model_that_bfloat16_cannot_capture_keeps_float32(units: None) -> None:
    def refuse(plan: Plan) -> Compressed:
        assert plan.dtype == DTYPE
        raise NotUsableError("expected m1 and m2 to have the same dtype")

    tried = trials(trial("inductor", 1.0))
    try_half(tried, refuse)
    run = chosen_dtype(Resolved(PLAN, (AUTO,)), choose(tried), TRIED)
    assert run.plan.dtype == "float32"
    assert "bfloat16: expected m1 and m2 to have the same dtype" in run.choices[0].reason


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.openvino
@pytest.mark.skipif(openvino.missing() is not None, reason=openvino.missing() or "")
@pytest.mark.skipif(not device.has_bfloat16(), reason="the CPU has no bfloat16 units")
def test_a_published_bfloat16_artifact_says_so_and_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infer import Predictor
    from infer.run import select, try_backends

    monkeypatch.setattr(half_precision, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(select, "_pays", lambda trial: True)
    monkeypatch.setattr(Trial, "slower", False)  # of so small a model
    for module in (half_precision, try_backends):
        monkeypatch.setattr(module, "candidates", lambda plan, steps=False: ["openvino"])
    (tmp_path / "wide.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.run.test_half_precision import Wide as build\n"
    )
    torch.save(Wide().state_dict(), tmp_path / "wide.pt")
    rows = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows)
    plan = Plan(
        source=str(tmp_path / "wide.pt"),
        model=f"{tmp_path / 'wide.py'}:build",
        inputs=("x=float32[batch,64]",),
        data=str(tmp_path / "rows.npz"),
        device="cpu",
        batches=(1,),
    )
    made = optimize(plan, tmp_path / "wide.infer")
    assert made.manifest.plan.dtype == DTYPE
    assert {row.name for row in made.report.tried} == {"openvino", "openvino bfloat16"}
    assert made.report.precision == DTYPE
    with Predictor.load(tmp_path / "wide.infer") as predictor:
        found = predictor.predict({"x": rows})
    assert len(found) == 1
