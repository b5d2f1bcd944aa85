"""A language model that can't generate says so first, or is refused before anything costly where it was asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer import Plan, Predictor, optimize
from infer.errors import NotUsableError, UsageError
from infer.reporter import Reporter
from infer.run.stages import optimize as run
from tests.support.tiny_decoders import build
from tests.support.tiny_hybrids import HYBRIDS

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
HYBRID = "layer model.layers.1.self_attn (MiniMaxLightningAttention) mixes tokens"


class Steps(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def step(self, name: str, detail: str = "") -> None:
        self.names.append(name)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hybrid") / "minimax"
    build("minimax", sizes=HYBRIDS["minimax"][0]).save_pretrained(folder)
    return str(folder)


def plan(source: str, **changes: object) -> Plan:
    return Plan(source=source, backend="eager", batches=(), data="random").with_(**changes)


def test_a_hybrid_reports_first_that_it_only_scores_text_and_why(hybrid: str, tmp_path: Path) -> None:
    artifact = optimize(plan(hybrid), tmp_path / "a.infer")
    assert artifact.manifest.verdict[0].startswith(f"scores text only: {HYBRID}")
    assert "generation" not in artifact.manifest.meta
    with Predictor.load(artifact.path) as predictor, pytest.raises(UsageError) as refused:
        predictor.generate("x")
    assert HYBRID in str(refused.value)
    assert "--backend" not in str(refused.value)  # no other one could either


def test_generation_with_a_hybrid_is_refused_before_capture(hybrid: str, tmp_path: Path) -> None:
    steps = Steps()
    with pytest.raises(NotUsableError) as refused:
        run(plan(hybrid, task="generate"), tmp_path / "a.infer", reporter=steps)
    assert str(refused.value).startswith(f"this model can't generate: {HYBRID}")
    assert refused.value.exit_code == 5
    assert steps.names == ["load"]
    assert not (tmp_path / "a.infer").exists()


def test_a_refusal_of_a_scoring_artifact_says_how_to_enable_generation(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "llama")
    artifact = optimize(plan(str(tmp_path / "llama"), task="score"), tmp_path / "a.infer")
    assert artifact.manifest.verdict[0] == "scores text only: requested by --task score"
    assert artifact.manifest.plan.task == "score"
    with Predictor.load(artifact.path) as predictor, pytest.raises(UsageError, match="make it again without"):
        predictor.generate("x")


def test_a_backend_without_steps_is_refused_before_loading(tmp_path: Path) -> None:
    from infer.run.resolve_plan import refuse_backend

    with pytest.raises(NotUsableError, match="backend trt has no attention over a paged KV cache"):
        refuse_backend(plan("absent", backend="trt", task="generate"))
    refuse_backend(plan("absent", backend="trt"))
    refuse_backend(plan("absent", backend="ort", task="generate"))


def test_an_unknown_task_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="generat.*score"):
        run(plan("absent", task="generat"), tmp_path / "a.infer")


def test_the_task_option_is_for_language_models_only(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "models/digits"
    asked = Plan(source=f"{source}.pt", model=f"{source}.py:build", task="generate", backend="eager")
    with pytest.raises(UsageError, match="--task generate is for language models"):
        run(asked, tmp_path / "a.infer")
