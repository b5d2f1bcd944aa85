"""Trials of one process pack weights once for a format, and lower single float layers once for a backend."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.ort import integer_or_float
from infer import Plan, plugins
from infer.artifact import store
from infer.budget_search.trial_process.messages import Setup, ToBeat, TrialRequest
from infer.budget_search.trial_process.session import Session
from infer.budget_search.trial_process.timing_lock import NAME as TIMING_LOCK
from infer.compress.assign import layer_timing, lowered_layers
from infer.compress.assign.layer_timing import LayerTime, LayerTimer
from infer.onnx import export
from infer.report.search_record import Candidate, TrialRecord
from infer.reporter import Reporter
from infer.run import compressed_graph, original_runners, stages, trial_timing
from infer.spec import Finding


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collect the shapes of the blocks of weights that int8 packs."""
    format = plugins.get("infer.compress.formats", "int8")
    shapes, quantize = list[tuple[int, ...]](), format.quantize

    def counted(weight: torch.Tensor, stats: Any, plan: Plan) -> Any:
        shapes.append(tuple(weight.shape))
        return quantize(weight, stats, plan)

    monkeypatch.setattr(format, "quantize", counted)
    return shapes


def run(session: Session, number: int, **candidate: Any) -> TrialRecord:
    done = session.run(TrialRequest(number=number, candidate=Candidate(quant="int8", **candidate), rivals=()))
    assert done.outcome == "published", done.reason
    return done


def test_weights_are_packed_once_for_all_backends(
    plan: Plan, tmp_path: Path, packed: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integer_or_float, "_compare", lambda *_: (True, Finding("", "", 0)))
    session = Session(
        Setup(plan=plan.with_(allow_slower=True), name="m.infer", work=str(tmp_path)), Reporter()
    )
    first = run(session, 0, backend="eager")
    known = list(packed)
    second = run(session, 1, backend="ort")
    assert known
    assert packed == known
    assert first.measured is not None
    assert second.measured is not None
    assert second.measured.error == pytest.approx(first.measured.error, rel=0.2)


def test_another_calibration_packs_anew(plan: Plan, tmp_path: Path, packed: list[tuple[int, ...]]) -> None:
    session = Session(
        Setup(plan=plan.with_(allow_slower=True), name="m.infer", work=str(tmp_path)), Reporter()
    )
    run(session, 0, backend="eager")
    known = list(packed)
    run(session, 1, backend="eager", calibrate="none")
    assert len(packed) == 2 * len(known)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.nn.Module]:
    """Collect the single layers that are captured to be timed; none is known from before."""
    layers, capture = list[torch.nn.Module](), lowered_layers.capture.capture

    def counted(module: torch.nn.Module, *given: Any, **options: Any) -> Any:
        layers.append(module.layer)  # type: ignore[arg-type]
        return capture(module, *given, **options)

    monkeypatch.setattr(lowered_layers, "capture", SimpleNamespace(capture=counted))
    timings = tmp_path / "dispatch"
    timings.mkdir()
    monkeypatch.setattr(layer_timing, "paths", SimpleNamespace(cache=lambda name: timings))
    return layers


@pytest.mark.parametrize(
    ("backend", "formats"),
    [
        ("ort", ("int4:16", "int4")),  # of int8 it measures the whole model
        pytest.param("openvino", ("int8:weight", "int4"), marks=pytest.mark.openvino),
    ],
)
def test_float_layers_are_lowered_once_for_all_formats(
    plan: Plan, tmp_path: Path, captured: list[torch.nn.Module], backend: str, formats: tuple[str, str]
) -> None:
    session = Session(Setup(plan=plan, name="m.infer", work=str(tmp_path)), Reporter())
    for number, quant in enumerate(formats):
        session.run(TrialRequest(number=number, candidate=Candidate(backend=backend, quant=quant), rivals=()))
    floats = [layer for layer in captured if type(layer) is torch.nn.Linear]
    assert len(floats) == 1, "of the one shape that formats take"
    assert len(captured) >= 3, "each format is timed"


def test_float_layers_of_a_session_are_below_its_folder(
    plan: Plan, tmp_path: Path, captured: list[torch.nn.Module]
) -> None:
    (tmp_path / "work").mkdir()
    session = Session(Setup(plan=plan, name="m.infer", work=str(tmp_path / "work")), Reporter())
    before = set(Path(tempfile.gettempdir()).iterdir())
    session.run(TrialRequest(number=0, candidate=Candidate(backend="ort", quant="int4"), rivals=()))
    assert captured
    assert set(Path(tempfile.gettempdir()).iterdir()) <= before | {tmp_path / "machine" / TIMING_LOCK}


def test_onnx_runtime_layers_that_it_decodes_if_slower_are_not_timed(
    plan: Plan, tmp_path: Path, captured: list[torch.nn.Module]
) -> None:
    session = Session(Setup(plan=plan, name="m.infer", work=str(tmp_path)), Reporter())
    for number, quant in enumerate(("nf4", "cluster", "int8", "int8:weight")):
        session.run(TrialRequest(number=number, candidate=Candidate(backend="ort", quant=quant), rivals=()))
    assert captured == []


def test_a_layer_is_lowered_once_for_all_batch_sizes(
    plan: Plan, tmp_path: Path, captured: list[torch.nn.Module]
) -> None:
    own = plan.with_(batches=(1, 4, 8))
    session = Session(Setup(plan=own, name="m.infer", work=str(tmp_path)), Reporter())
    session.run(TrialRequest(number=0, candidate=Candidate(backend="ort", quant="int4"), rivals=()))
    assert len(captured) <= 3, "in float, in the format, and in the format that takes its place"


def test_a_form_whose_layers_save_too_little_is_not_lowered(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerTimer, "measured", lambda *_: LayerTime(1e-5, 2e-5, 0.5, 0.5, 0.5))
    session = Session(Setup(plan=plan, name="m.infer", work=str(tmp_path)), Reporter())
    best = ToBeat(label="eager int8", ratios={}, size=1, error=0.0, least_gain={1: 0.5})
    candidate = Candidate(backend="ort", quant="int8:weight")
    done = session.run(TrialRequest(number=0, candidate=candidate, rivals=(), to_beat=best))
    assert done.outcome == "skipped"
    assert done.reason.endswith("at batch 1, with 500 ms less it would come near: slower than eager int8")
    assert done.measured is not None
    assert done.measured.layer_gain == {1: pytest.approx(1e-5)}
    assert not list(tmp_path.glob("trial-*/*"))


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("most", "outcome"), [(1e-6, "skipped"), (1.0, "published")])
def test_a_format_whose_layers_take_too_long_is_not_quantized(
    plan: Plan,
    tmp_path: Path,
    packed: list[tuple[int, ...]],
    most: float,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LayerTimer, "measured", lambda *_: LayerTime(1e-5, 2e-5, 0.5, 0.5, 0.5))
    session = Session(Setup(plan=plan.with_(batches=(1, 8)), name="m.infer", work=str(tmp_path)), Reporter())
    best = ToBeat(label="inductor nf4", ratios={}, size=1, error=0.0, most_layers={1: most})
    done = session.run(
        TrialRequest(number=0, candidate=Candidate(backend="eager", quant="int8"), rivals=(), to_beat=best)
    )
    assert done.outcome == outcome, done.reason
    assert bool(packed) is (outcome == "published")
    assert done.measured is not None
    assert done.measured.layer_seconds[1] == pytest.approx(1e-5)
    if outcome == "skipped":
        assert done.reason.endswith("with 1.00 µs it would come near: slower than inductor nf4")
        assert done.measured.layer_seconds.keys() == {1}, "no other batch size was timed"


def test_float_forms_that_were_trials_are_not_timed_again_for_formats(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, in_turns = list[int](), trial_timing.latency.in_turns

    def counted(calls: Any, **limits: Any) -> Any:
        timed.append(len(calls))
        return in_turns(calls, **limits)

    monkeypatch.setattr(trial_timing.latency, "in_turns", counted)
    session = Session(
        Setup(plan=plan.with_(allow_slower=True), name="m.infer", work=str(tmp_path)), Reporter()
    )
    for number, backend in enumerate(("eager", "ort")):
        candidate = Candidate(backend=backend)
        assert session.run(TrialRequest(number=number, candidate=candidate)).outcome == "published"
    before = list(timed)
    done = session.run(
        TrialRequest(number=2, candidate=Candidate(backend="ort", quant="int8"), rivals=("ort",))
    )
    assert done.outcome == "published", done.reason
    assert done.measured is not None
    assert done.measured.rival_seconds.keys() == {"torch eager", "ort float32"}
    assert before
    assert timed == before


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("int8", "gain"), [(1e-5, 3e-5), (9e-5, 0.0)])
def test_a_layer_that_loses_may_gain_what_its_fallback_does(
    plan: Plan, tmp_path: Path, int8: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(self: LayerTimer, candidates: Any, weight: Any, format: str, x: Any) -> LayerTime:
        seconds = {"int4": 8e-5, "int8": int8, "fp16": 9e-5}[format]
        return LayerTime(seconds, 4e-5, *[seconds / 4e-5] * 3)

    monkeypatch.setattr(LayerTimer, "measured", measured)
    session = Session(Setup(plan=plan, name="m.infer", work=str(tmp_path)), Reporter())
    best = ToBeat(label="inductor int8", ratios={}, size=1, error=0.0, least_gain={1: 0.5})
    done = session.run(
        TrialRequest(number=0, candidate=Candidate(backend="ort", quant="int4"), rivals=(), to_beat=best)
    )
    assert done.outcome == "skipped", done.reason
    assert done.measured is not None
    assert done.measured.layer_gain == {1: pytest.approx(gain)}


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("backend", "quant", "gain", "outcome"),
    [
        ("ort", "nf4", 1.0, "skipped"),
        ("ort", "nf4", 0.0, "published"),
        ("ort", "int8:weight", 1.0, "skipped"),
        ("ort", "int8:weight", 0.0, "published"),
        pytest.param("openvino", "int8:weight", 1.0, "skipped", marks=pytest.mark.openvino),
        pytest.param("openvino", "int8:weight", 0.0, "refused", marks=pytest.mark.openvino),
    ],
)
def test_layers_that_would_become_float_bound_a_trial_too(
    plan: Plan,
    tmp_path: Path,
    backend: str,
    quant: str,
    gain: float,
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer loses here: ONNX Runtime decodes it; in OpenVINO int8:weight has no format to fall back to."""
    monkeypatch.setattr(LayerTimer, "measured", lambda *_: LayerTime(4e-5, 2e-5, 2.0, 2.0, 2.0))
    session = Session(Setup(plan=plan, name="m.infer", work=str(tmp_path)), Reporter())
    best = ToBeat(label="inductor int8", ratios={}, size=1, error=0.0, least_gain={1: gain / 2})
    done = session.run(
        TrialRequest(number=0, candidate=Candidate(backend=backend, quant=quant), rivals=(), to_beat=best)
    )
    assert done.outcome == outcome, done.reason
    if outcome == "skipped":
        assert done.measured is not None
        assert done.measured.layer_gain == {1: 0.0}


def test_float_and_quantized_trials_in_turns_load_the_source_twice(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = list[str](), stages.load
    monkeypatch.setattr(
        stages, "load", lambda run, *rest, **more: loads.append(run.plan.quant) or load(run, *rest, **more)
    )
    session = Session(
        Setup(plan=plan.with_(allow_slower=True), name="m.infer", work=str(tmp_path)), Reporter()
    )
    for number, quant in enumerate(("none", "int8", "none", "nf4")):
        session.run(TrialRequest(number=number, candidate=Candidate(backend="eager", quant=quant), rivals=()))
    assert loads == ["none", "int8"]


def test_float_and_quantized_trials_are_judged_by_the_same_rows(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    run_original = original_runners.Eager.run

    def counted(form: original_runners.Eager, inputs: Any) -> Any:
        asked.append(len(next(iter(inputs.values()))))
        return run_original(form, inputs)

    setup = Setup(plan=plan.with_(allow_slower=True, batches=()), name="m.infer", work=str(tmp_path))
    session = Session(setup, Reporter())
    session.run(TrialRequest(number=0, candidate=Candidate(backend="eager"), rivals=()))
    first = session._sources.last
    monkeypatch.setattr(original_runners.Eager, "run", counted)
    session.run(TrialRequest(number=1, candidate=Candidate(backend="eager", quant="int8"), rivals=()))
    second = session._sources.last
    assert first is not None
    assert second is not None
    assert first is not second
    for name, rows in first.original.loaded.samples.items():
        assert torch.equal(rows, second.original.loaded.samples[name])
    assert not asked, "the original was asked again for rows that it had answered"


@pytest.mark.parametrize(
    ("candidates", "models", "exports"),
    [
        ((("eager", "int8"), ("ort", "int8"), ("openvino", "int8")), 1, 1),
        ((("ort", "int8"), ("ort", "int4"), ("ort", "int8")), 3, 3),
    ],
    ids=["backends of a format", "formats in turns"],
)
@pytest.mark.openvino
def test_a_format_is_captured_and_exported_once_for_all_backends(
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    candidates: tuple[tuple[str, str], ...],
    models: int,
    exports: int,
) -> None:
    made, translated = list[str](), list[object]()
    quantize, translate = compressed_graph._quantized, export._translated
    monkeypatch.setattr(
        compressed_graph, "_quantized", lambda own, *rest: made.append(own.quant) or quantize(own, *rest)
    )
    monkeypatch.setattr(
        export, "_translated", lambda graph, *rest: translated.append(graph) or translate(graph, *rest)
    )
    own = plan.with_(allow_slower=True)  # no layer is timed alone
    session = Session(Setup(plan=own, name="m.infer", work=str(tmp_path)), Reporter())
    for number, (backend, quant) in enumerate(candidates):
        candidate = Candidate(backend=backend, quant=quant)
        done = session.run(TrialRequest(number=number, candidate=candidate, rivals=()))
        assert done.outcome == "published", done.reason
        assert quant in {
            layer.format for layer in store.read_manifest(tmp_path / f"trial-{number}" / "m.infer").layers
        }
    assert (len(made), len(translated)) == (models, exports)


@pytest.mark.parametrize(("far", "made"), [(None, True), (1e9, True), (1e-3, False)])
def test_a_far_slower_trial_is_measured_without_an_artifact(
    plan: Plan, tmp_path: Path, far: float | None, made: bool
) -> None:
    session = Session(Setup(plan=plan, name="m.infer", work=str(tmp_path)), Reporter())
    best = ToBeat(label="ort float", ratios={"torch eager": {1: 1.0}}, size=10**9, error=1.0, far=far)
    done = session.run(TrialRequest(number=0, candidate=Candidate(backend="eager"), rivals=(), to_beat=best))
    assert done.outcome == "published", done.reason
    assert (tmp_path / "trial-0" / "m.infer").exists() is made
    assert done.measured is not None
    assert done.measured.complete is made
    assert done.measured.seconds.keys() == {1}
    assert done.command.startswith("infer optimize ")
