"""`--recover` in the pipeline: its budget, its place in a plan, and the stage between quantization and capture."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.compress.assign import CalibrationSet
from infer.errors import NotUsableError, UsageError
from infer.load import load
from infer.options.values import recovery_budget
from infer.plan import Plan
from infer.reporter import Reporter
from infer.run.recover_quality import recover_quality
from infer.run.resolve_plan import check_plan
from infer.spec import TensorSpec
from tests.support import tiny_chats

pytest.importorskip("accelerate")
PLAN = Plan(source="m.pt", quant="cluster:3", recover="240")


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def calibration_set(model: nn.Module | None) -> CalibrationSet:
    rows = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    inputs = (TensorSpec("x", "float32", ("batch", 64)),)
    return CalibrationSet(model, inputs, ("y",), "tensors", {"x": rows[:32]}, {"x": rows[32:]})


def error(model: nn.Module, original: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - original(x)).norm() / original(x).norm())


def test_recovery_trains_on_calibration_rows_and_helps_on_others() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        original = Scores().eval()
    small, known = copy.deepcopy(original), calibration_set(original)
    compress.quantize_model(small, PLAN)
    before = error(small, original, known.samples["x"])
    findings = recover_quality(PLAN, small, known, Reporter())
    values = {finding.what: finding.value for finding in findings}
    assert float(values["after"]) < float(values["before"])
    assert values["learning curve"]
    assert error(small, original, known.samples["x"]) < before


def test_all_text_but_the_evaluation_rows_calibrates_and_trains(tmp_path: Path) -> None:
    folder = tiny_chats.source(tmp_path / "llama")
    text = random.Random(0).choices("abcdefgh ", k=128 * 200)
    (tmp_path / "text.txt").write_text("".join(text))
    plan = Plan(source=str(folder), data=str(tmp_path / "text.txt"), quant="nf4", max_length=64)
    without, found = load(plan), load(plan.with_(recover="1min"))
    judging = {tuple(row.tolist()) for row in found.samples["input_ids"]}
    teaching = {tuple(row.tolist()) for row in found.training["input_ids"]}
    assert torch.equal(found.training["input_ids"], without.training["input_ids"])
    assert not load(plan.with_(calibrate="none")).training
    assert torch.equal(found.samples["input_ids"], without.samples["input_ids"])
    assert torch.equal(found.calibration["input_ids"], without.calibration["input_ids"])
    assert not judging & teaching
    assert len(judging) + len(teaching) == len("".join(text)) // found.samples["input_ids"].shape[1]


def test_recovery_needs_weights_in_memory() -> None:
    with pytest.raises(NotUsableError, match="not in memory"):
        recover_quality(PLAN, Scores(), calibration_set(None), Reporter())


def test_recovery_needs_a_format() -> None:
    with pytest.raises(UsageError, match="no format was given"):
        check_plan(PLAN.with_(quant="none"))


@pytest.mark.parametrize(("text", "budget"), [("30min", (1800.0, None)), ("200000", (None, 200000))])
def test_recovery_budgets_are_parsed(text: str, budget: tuple[float | None, int | None]) -> None:
    assert recovery_budget(text) == budget


@pytest.mark.parametrize("text", ["0", "-5", "30 minutes", "1.5"])
def test_invalid_recovery_budgets_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        recovery_budget(text)
