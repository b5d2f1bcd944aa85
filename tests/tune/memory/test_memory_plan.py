"""Memory plan: parts that can be counted by hand, steps of any size without running them, and the choice to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.errors import ResourceError, UsageError
from infer.reporter import Reporter
from infer.tune.checkpoints import remove_checkpoints
from infer.tune.data.rows import TensorRows
from infer.tune.memory import memory_plan
from infer.tune.memory.memory_plan import MemoryPlan, fit_memory, plan_memory, plan_run
from infer.tune.memory.simulated_step import OUTSIDE, step_memory
from infer.tune.memory.technique_table import measure_techniques, techniques
from infer.tune.settings import TrainSettings

SIZE, WIDE, COUNT = 32, 256, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(SIZE, WIDE, bias=False), nn.Linear(WIDE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


class RegressionObjective:
    """Sum of squares of a stack of blocks; `asks` makes the loss read a value, which needs data."""

    def __init__(self, asks: bool = False) -> None:
        self.model = nn.Sequential(nn.ModuleList(Block() for _ in range(COUNT)))
        self.asks = asks

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = batch["x"]
        for block in self.model[0]:
            x = block(x)
        if self.asks:
            assert float(x.detach().sum()) < 1e9
        return x.square().sum(), torch.tensor(len(x))

    def measure(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.loss(batch)


ROWS = TensorRows({"x": torch.randn(8, 50, SIZE)})
WEIGHTS = COUNT * 2 * SIZE * WIDE * 4
ROW = 50 * WIDE * 4  # bytes of one row after ReLU


def settings(**options: Any) -> TrainSettings:
    return TrainSettings(batch=8, **options)


def test_weights_gradients_and_states_are_counted_exactly() -> None:
    plan = plan_memory(RegressionObjective(), ROWS, settings(micro_batch=2))
    assert (plan.weights, plan.gradients, plan.optimizer) == (WEIGHTS, WEIGHTS, 2 * WEIGHTS)
    muon = plan_memory(RegressionObjective(), ROWS, settings(micro_batch=2, optimizer="muon"))
    assert muon.optimizer == WEIGHTS
    assert plan.total == plan.process + 4 * WEIGHTS + plan.activations + plan.workspace


@pytest.mark.parametrize("asks", [False, True])
def test_activations_are_what_each_block_keeps_with_or_without_data(asks: bool) -> None:
    plan = plan_memory(RegressionObjective(asks), ROWS, settings(micro_batch=2))
    blocks = {name: size for name, size in plan.by_block.items() if name != OUTSIDE}
    # ReLU's output, which the second product keeps too, and the block's input.
    assert blocks == {f"0.{i}": 2 * (ROW + 50 * SIZE * 4) for i in range(COUNT)}
    assert sum(blocks.values()) <= plan.activations < 1.3 * sum(blocks.values())


def test_a_plan_of_many_rows_equals_a_step_that_is_run() -> None:
    objective = RegressionObjective()
    planned = plan_memory(objective, ROWS, settings(micro_batch=8))
    real = step_memory(objective.model, lambda b: objective.loss(b)[0], ROWS.batch(range(8)), CPU)
    assert planned.activations == real.activations
    assert planned.workspace == pytest.approx(real.workspace, abs=4 * ROW)
    assert all(parameter.grad is None for parameter in objective.model.parameters())


def test_checkpointing_is_planned_with_one_block_at_a_time() -> None:
    plain = plan_memory(RegressionObjective(), ROWS, settings(micro_batch=8))
    less = plan_memory(RegressionObjective(), ROWS, settings(micro_batch=8, activation_checkpointing=True))
    assert less.activations < 0.3 * plain.activations
    assert less.total - less.process < plain.total - plain.process


def totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan.MemoryPlanner, "_process", lambda self: 0)


def test_the_choice_takes_smaller_micro_batches_before_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    totals(monkeypatch)
    objective, asked = RegressionObjective(), settings()
    whole = plan_memory(objective, ROWS, asked).total
    assert fit_memory(objective, ROWS, asked, whole).settings.micro_batch == 8
    half = fit_memory(objective, ROWS, asked, whole - 1)
    assert (half.settings.micro_batch, half.settings.activation_checkpointing) == (4, False)
    assert half.total < whole
    least = plan_memory(objective, ROWS, settings(micro_batch=1)).total
    tight = fit_memory(objective, ROWS, asked, least - 1)
    assert tight.settings.activation_checkpointing
    fixed = fit_memory(objective, ROWS, settings(micro_batch=8), whole - 1)
    assert (fixed.settings.micro_batch, fixed.settings.activation_checkpointing) == (8, True)


def test_a_limit_that_nothing_fits_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    totals(monkeypatch)
    with pytest.raises(
        ResourceError, match=r"needs at least \d+ kB \(micro-batch 1, .*allowed are 1.00 kB"
    ) as found:
        fit_memory(RegressionObjective(), ROWS, settings(), 1000)
    assert found.value.exit_code == 7
    smallest = int(found.value.hint.split("--max-memory ")[1].split("MB")[0])
    assert fit_memory(RegressionObjective(), ROWS, settings(), smallest * 10**6).settings.micro_batch == 1


def test_findings_add_up_to_the_planned_peak() -> None:
    plan = MemoryPlan(settings(), 100, 20, 3, 6, 50, 10, {"a": 30, OUTSIDE: 20})
    *parts, peak = plan.findings()
    assert sum(part.value for part in parts) == peak.value == plan.total == 189
    assert "planned 189 B, +6%" in plan.compared(200).why


def test_a_resumed_run_keeps_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals(monkeypatch)
    objective, reporter = RegressionObjective(), Reporter()
    whole = plan_memory(objective, ROWS, settings()).total
    asked = settings(max_memory=whole - 1)
    chosen, plan = plan_run(objective, ROWS, asked, tmp_path / "run", reporter)
    assert chosen.micro_batch == 4
    assert any(finding.what == "planned peak" for finding in reporter.findings)
    monkeypatch.setattr(memory_plan.MemoryPlanner, "_process", lambda self: whole)  # now it would choose less
    assert plan_run(objective, ROWS, asked, tmp_path / "run", reporter)[0] == chosen
    with pytest.raises(ResourceError):
        plan_run(objective, ROWS, settings(max_memory=whole - 2), tmp_path / "run", reporter)
    remove_checkpoints(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_limit_for_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="--max-memory plans one process, and accelerate started several"):
        plan_run(RegressionObjective(), ROWS, settings(max_memory=10**9), tmp_path, Reporter())
    assert plan_run(RegressionObjective(), ROWS, settings(), tmp_path, Reporter())[1] is None


def test_the_table_measures_each_technique_and_changes_no_weight() -> None:
    objective, asked = RegressionObjective(), settings(micro_batch=2)
    before = [parameter.clone() for parameter in objective.model.parameters()]
    rows = measure_techniques(ROWS, techniques(objective, asked))
    names = [row.technique for row in rows]
    assert names[:3] == ["as given: 2 rows, adamw, float32", "with activation checkpointing", "micro-batch 1"]
    assert {"bfloat16", "muon", "paged-adamw8bit"} <= set(names)
    assert all(row.measured and row.seconds for row in rows if not row.why)
    assert "states are paged between a GPU and RAM" in next(
        r.why for r in rows if r.technique.startswith("paged")
    )
    assert all(map(torch.equal, before, objective.model.parameters()))
    assert all(parameter.grad is None for parameter in objective.model.parameters())
