"""`--recover` through the whole pipeline: the published artifact holds what the float model taught."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.errors import UsageError
from infer.options.values import recovery_budget
from infer.pipeline import stages
from infer.pipeline.resolve_plan import check_plan
from infer.plan import Plan

pytest.importorskip("accelerate")
MODELS = Path(__file__).resolve().parents[2] / "models"
DIGITS = Plan(
    source=str(MODELS / "digits.pt"), model=f"{MODELS / 'digits.py'}:build", allow_slower=True, batches=(),
    backend="eager", quant="cluster:3",
)  # fmt: skip


def test_a_recovered_model_is_judged_and_published_with_its_curve(tmp_path: Path) -> None:
    plain = stages.optimize(DIGITS, tmp_path / "plain.infer")
    taught = stages.optimize(DIGITS.with_(recover="200"), tmp_path / "taught.infer")
    said = {f.what: f.value for f in taught.manifest.findings if f.stage == "recover"}
    assert float(said["after"]) < float(said["before"])  # type: ignore[arg-type]
    assert said["learning curve"]
    assert taught.manifest.plan.recover == "200"
    kl = [
        next(m.number for m in made.report.fidelity if m.label == "logits.kl" and m.number is not None)
        for made in (plain, taught)
    ]
    assert kl[1] < kl[0], "on rows that neither trained nor chose the step"
    assert [(one.name, one.format, one.bits) for one in taught.manifest.layers] == [
        (one.name, one.format, one.bits) for one in plain.manifest.layers
    ]


def test_recovery_needs_a_format() -> None:
    with pytest.raises(UsageError, match="what quantization lost"):
        check_plan(DIGITS.with_(quant="none", recover="1min"))


@pytest.mark.parametrize(("text", "budget"), [("30min", (1800.0, None)), ("200000", (None, 200000))])
def test_budgets_of_recovery(text: str, budget: tuple[float | None, int | None]) -> None:
    assert recovery_budget(text) == budget


@pytest.mark.parametrize("text", ["0", "-5", "30 minutes", "1.5"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        recovery_budget(text)
