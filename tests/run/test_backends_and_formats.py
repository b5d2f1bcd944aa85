"""The whole pipeline on a real model: every backend × format is faithful, or refused with a reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from infer import Plan, Predictor, latency, plugins
from infer.cli import main
from infer.errors import BusyError, GateError, InferError, NotUsableError, UsageError
from infer.graph import storage
from infer.graph.program import Graph
from infer.reporter import Reporter
from infer.run import stages
from infer.run.float_reference import FloatReferences
from infer.run.run_trial import run_trial

MODELS = Path(__file__).resolve().parents[2] / "models"
DIGITS = Plan(
    source=str(MODELS / "digits.pt"), model=f"{MODELS / 'digits.py'}:build", allow_slower=True, batches=(1,)
)
UNTIMED = DIGITS.with_(batches=())
# Formats that are compiled to calls of their own; the others differ from one of them by the numbers in its tables.
COMPILED = ("none", "int8", "int8:weight", "int8:static", "nf4", "cluster:3")
CELLS = [
    *(("eager", quant) for quant in (*COMPILED, "nf4:16", "cluster:2", "cluster:4", "cluster:6")),
    *(
        ("inductor", quant) for quant in ("int8", "int8:static", "nf4")
    ),  # half a minute each; `make table` has all
    *(pytest.param("openvino", quant, marks=pytest.mark.openvino) for quant in COMPILED),
    *((backend, quant) for backend in ("ort", "trt") for quant in COMPILED),
]
MEETS_NO_PROMISE = {"cluster:2", "cluster:3"}  # the gate decides; a refusal must name the figure


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Original:
    """digits loaded and captured once, with its float forms, and quantized once to each format, for every cell."""

    def __init__(self, work: Path) -> None:
        self.work = work
        loaded, run = stages.load(stages.resolve(DIGITS))
        self.plan, self.model = run.plan, stages.capture_original(run.plan, loaded, Reporter())
        self.graph = self.model.graph
        self.floats = FloatReferences(self.graph, work)
        self._quantized: dict[str, Graph] = {}

    def quantized(self, plan: Plan) -> Graph:
        """Quantize to the plan's format, once for all backends, as where a plan leaves the backend open."""
        if plan.quant not in self._quantized:
            self._quantized[plan.quant] = stages.compress_model(plan, self.model).graph
        return self._quantized[plan.quant]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("table"))


@pytest.mark.parametrize(("backend", "quant"), CELLS)
def test_every_backend_and_quantizer_is_faithful_or_refuses_with_a_reason(
    original: Original, backend: str, quant: str
) -> None:
    if reason := plugins.why_not("backends", backend):
        pytest.skip(f"{backend}: {reason}")
    plan = original.plan.with_(quant=quant, backend=backend, batches=())
    small = original.quantized(plan)
    if reason := plugins.get("backends", backend).refuses(small, plan):
        assert len(reason) > 20
        pytest.skip(f"refused: {reason}")
    place = original.work / f"{backend}-{quant.replace(':', '-')}"
    (place / "graph").mkdir(parents=True)
    storage.save(small, place / "graph")
    trial = run_trial(plan, original.graph, small, place / "graph", place, lambda *_: None, original.floats)
    reason = trial.unfaithful(plan)
    image = original.graph.samples["image"]
    whole = trial.runner.run({"image": image})["logits"]
    # A convolution's last bit depends on the batch size; behind it an int8 activation may round the other way.
    close = 1e-4 if quant == "none" or quant.endswith(":weight") else 1e-3
    for rows in (1, 3, 63):  # whatever it was compiled with
        part = trial.runner.run({"image": image[:rows].contiguous()})["logits"]
        torch.testing.assert_close(part, whole[:rows], rtol=close, atol=close)
    trial.close()
    if quant in MEETS_NO_PROMISE and reason:
        assert "allowed for" in reason
    else:
        assert reason is None


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> stages.Outcome:
    """digits, published as int8 for plain torch."""
    folder = tmp_path_factory.mktemp("int8")
    return stages.optimize(UNTIMED.with_(backend="eager", quant="int8"), folder / "digits.infer")


@pytest.mark.parametrize("quant", ["int8", "nf4"])
def test_a_published_artifact_is_accurate_and_smaller(
    int8: stages.Outcome, tmp_path: Path, quant: str
) -> None:
    made = int8
    if quant != "int8":
        made = stages.optimize(UNTIMED.with_(backend="eager", quant=quant), tmp_path / "digits.infer")
    digits = recipe("digits")
    with Predictor.load(made.path) as predictor:
        accuracy = digits.evaluate(predictor.predict)["accuracy"]
    assert accuracy >= 0.97
    weights = (made.path / "weights/model.safetensors").stat().st_size
    assert weights < (MODELS / "digits.pt").stat().st_size / {"int8": 3, "nf4": 2}[quant]


@pytest.mark.usefixtures("measured_memory")
def test_a_published_artifact_reports_its_memory(tmp_path: Path) -> None:
    made = stages.optimize(UNTIMED.with_(backend="eager", quant="int8"), tmp_path / "d.infer")
    memory = made.report.memory
    assert 0 < memory.runtime < memory.peak
    assert memory.open_seconds > 0


def test_an_artifact_can_be_reproduced_from_its_manifest(int8: stages.Outcome, tmp_path: Path) -> None:
    second = stages.optimize(int8.manifest.plan, tmp_path / "b.infer")
    assert second.manifest.plan == int8.manifest.plan
    weights = "weights/model.safetensors"
    assert second.manifest.files[weights] == int8.manifest.files[weights]


def test_an_unfaithful_result_is_refused_names_layers_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"not faithful enough: .*worst layers: .* 0\.\d+"):
        stages.optimize(
            UNTIMED.with_(backend="eager", quant="cluster:2", max_error=1e-4), tmp_path / "d.infer"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_slower_result_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infer.run.trial import Trial

    monkeypatch.setattr(Trial, "slower", property(lambda self: True))
    with pytest.raises(GateError, match=r"refused, (slower|no gain): .*--allow-slower"):
        stages.optimize(DIGITS.with_(backend="eager", allow_slower=False), tmp_path / "d.infer")
    assert list(tmp_path.iterdir()) == []
    made = stages.optimize(DIGITS.with_(backend="eager"), tmp_path / "d.infer")
    assert any("--allow-slower" in line for line in made.manifest.verdict)


@pytest.mark.usefixtures("noticed")
def test_a_named_backend_that_is_slower_than_today_ends_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = latency.summarize([1.09]), latency.summarize([1.0])
    slow = latency.Paired(1.09, 1.08, 1.1, "slower", 11, *once)
    monkeypatch.setattr(latency, "paired", lambda *_, **__: slow)
    call = ["optimize", DIGITS.source, "--model", str(DIGITS.model), "--backend", "ort", "--batch", "1"]
    call += ["--output", str(tmp_path / "d.infer")]
    assert main(call) == 4
    said = capsys.readouterr().err.splitlines()[-1]
    assert "refused, no gain: ort 1.09x slower at batch 1, " in said
    assert "; against torch eager and a source of 1.22 MB" in said
    assert list(tmp_path.iterdir()) == []
    assert main([*call, "--allow-slower"]) == 0


def test_names_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    nowhere = Plan(source=str(tmp_path / "absent.pt"))
    with pytest.raises(UsageError, match="no backend named 'inducter'. Known: .*Did you mean inductor?"):
        stages.optimize(nowhere.with_(backend="inducter"), tmp_path / "d.infer")
    with pytest.raises(UsageError, match="no quantizer named 'int9'"):
        stages.optimize(nowhere.with_(quant="int9"), tmp_path / "d.infer")
    with pytest.raises(UsageError, match="cluster"):
        stages.optimize(nowhere.with_(quant="cluster:7"), tmp_path / "d.infer")


def test_trt_without_a_device_suggests_another_backend(tmp_path: Path) -> None:
    if plugins.why_not("backends", "trt") is None:
        pytest.skip("TensorRT runs here")
    with pytest.raises(
        NotUsableError, match="backend trt is not usable on this machine: .*. Use --backend inductor"
    ):
        stages.optimize(DIGITS.with_(backend="trt", quant="int8"), tmp_path / "d.infer")


def test_int8_for_trt_is_calibrated_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.get("backends", "trt"), "missing", lambda: None)
    run = stages.resolve(DIGITS.with_(backend="trt", quant="int8"))
    assert run.plan.quant == "int8:static"
    assert any(c.what == "quant" and "calibrated" in c.reason for c in run.choices)


def test_an_existing_artifact_is_not_overwritten(int8: stages.Outcome) -> None:
    before = {path: path.read_bytes() for path in int8.path.rglob("*") if path.is_file()}
    with pytest.raises(BusyError):
        stages.optimize(DIGITS.with_(backend="eager"), int8.path)
    assert {path: path.read_bytes() for path in int8.path.rglob("*") if path.is_file()} == before


def test_auto_chooses_a_backend_and_reports_the_reason(tmp_path: Path) -> None:
    made = stages.optimize(DIGITS.with_(backend="auto"), tmp_path / "d.infer")
    choice = next(c for c in made.manifest.choices if c.what == "backend")
    assert choice.asked == "auto"
    assert choice.value == made.manifest.backend
    assert "the others" in choice.reason or "could not win: inductor" in choice.reason
    with Predictor.load(made.path) as predictor:
        assert recipe("digits").evaluate(predictor.predict)["accuracy"] >= 0.98


def test_an_interrupted_run_leaves_no_file(tmp_path: Path) -> None:
    class Interrupting(Reporter):
        def step(self, name: str, detail: str = "") -> None:
            if name == "compare":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.optimize(DIGITS.with_(backend="eager"), tmp_path / "d.infer", reporter=Interrupting())
    assert list(tmp_path.iterdir()) == []


def test_errors_carry_their_exit_codes() -> None:
    assert issubclass(GateError, InferError)
    assert GateError.exit_code == 4
