"""The training loop: exact accumulation, budgets, early stop, and faults that end a run with a sentence."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.errors import GateError, ResourceError, UsageError
from infer.options import from_values
from infer.tune import checkpoints
from infer.tune.data.rows import TensorRows, rows_of_step
from infer.tune.objective import Rows
from infer.tune.settings import SCHEDULES, TrainSettings
from infer.tune.training_loop import Interrupt, factor, train
from infer.tune.training_state import TrainResult
from tests.support.interrupted_training import DROPOUT, HELD_OUT, ROWS, SETTINGS
from tests.support.tiny_objective import TokenObjective, token_rows


def run(folder: Path, objective: Any = None, rows: Rows = ROWS, **options: Any) -> tuple[Any, TrainResult]:
    objective = objective or TokenObjective()
    options = {"steps": 6, "batch": 6, "learning_rate": 0.01, "measure_every": 3, **options}
    return objective, train(objective, rows, HELD_OUT, TrainSettings(**options), folder)


def weights(objective: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in objective.model.state_dict().items()}


def slow_twin(steps: int, batch: int, rate: float, clip: float) -> dict[str, Tensor]:
    """Plain PyTorch: the mean over all tokens of the whole batch, one forward pass a step."""
    objective = TokenObjective()
    optimizer = torch.optim.AdamW(
        objective.model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for step in range(steps):
        batch_rows = ROWS.batch(rows_of_step(ROWS, step * batch, batch, seed=0))
        logits = objective.model(batch_rows["ids"]).flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(
            logits, batch_rows["targets"].flatten(), ignore_index=-1, reduction="mean"
        )
        optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(objective.model.parameters(), clip)
        optimizer.step()
    return weights(objective)


@pytest.mark.parametrize("micro_batch", [None, 1, 2, 4, 5])
def test_accumulation_equals_one_large_token_averaged_batch(micro_batch: int | None, tmp_path: Path) -> None:
    objective, _ = run(tmp_path, micro_batch=micro_batch, schedule="constant", warmup=0.0, clip=0.5)
    for name, expected in slow_twin(6, 6, 0.01, 0.5).items():
        torch.testing.assert_close(objective.model.state_dict()[name], expected, rtol=2e-4, atol=2e-6)


def test_a_mean_of_means_would_be_another_result() -> None:
    parts = [ROWS.batch([number]) for number in (0, 1, 2)]
    objective = TokenObjective()
    sums = [objective.loss(part) for part in parts]
    exact = sum(loss for loss, _ in sums) / sum(terms for _, terms in sums)
    assert abs(exact - sum(loss / terms for loss, terms in sums) / 3) > 1e-3


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_every_optimizer_learns_the_rule(optimizer: str, schedule: str, tmp_path: Path) -> None:
    _, result = run(tmp_path, steps=30, optimizer=optimizer, schedule=schedule, learning_rate=0.03)
    assert result.best_held_out is not None
    assert result.first_held_out is not None
    assert result.best_held_out < 0.5 * result.first_held_out


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_trains_float32_parameters(precision: str, tmp_path: Path) -> None:
    objective, result = run(tmp_path, steps=40, precision=precision, learning_rate=0.03)
    assert {tensor.dtype for tensor in weights(objective).values()} == {torch.float32}
    assert result.best_held_out < 0.7 * result.first_held_out


@pytest.mark.parametrize(
    ("budget", "stopped", "steps"),
    [
        ({"steps": 4}, "steps", 4),
        ({"steps": None}, "epochs", 4),  # 23 rows, 6 a step
        ({"steps": None, "epochs": 2}, "epochs", 8),
        ({"steps": None, "tokens": 60}, "tokens", None),
        ({"steps": None, "time": 1e-6}, "time", 1),
    ],
)
def test_the_first_budget_that_is_used_up_ends_the_run(
    budget: dict[str, Any], stopped: str, steps: int | None, tmp_path: Path
) -> None:
    _, result = run(tmp_path, **budget)
    assert result.stopped == stopped
    assert steps is None or result.steps == steps
    assert stopped != "tokens" or 60 <= result.terms < 60 + 6 * 9


def test_early_stop_puts_the_best_parameters_back(tmp_path: Path) -> None:
    objective, result = run(
        tmp_path, steps=400, learning_rate=0.5, measure_every=1, patience=3, clip=0.0, schedule="constant"
    )
    assert result.stopped == "early stop"
    assert result.steps == result.best_step + 3
    with torch.no_grad():
        loss, terms = objective.measure(HELD_OUT.batch(range(len(HELD_OUT))))
    assert float(loss / terms) == pytest.approx(result.best_held_out, rel=1e-5)


class BreaksAt(TokenObjective):
    """Gives a loss of its own from some step on."""

    def __init__(self, step: int, factor: float) -> None:
        super().__init__()
        self.step, self.factor, self.calls = step, factor, 0

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss, terms = super().loss(batch)
        self.calls += 1
        return loss * self.factor if self.calls > self.step else loss, terms

    def measure(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return TokenObjective.loss(self, batch)


def test_a_loss_that_is_no_number_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"the loss is nan at step 4 \(learning rate 0.01") as caught:
        run(tmp_path, BreaksAt(3, float("nan")))
    assert "--learning-rate" in str(caught.value)


def test_a_diverging_loss_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="the loss diverges"):
        run(tmp_path, BreaksAt(25, 1000.0), steps=50)


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = checkpoints.save_file, []

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) > 3:  # two of the best parameters and one checkpoint fit
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(ResourceError, match=r"no space left.*Checkpoints stay in") as caught:
        run(tmp_path, checkpoint_every=0, measure_every=1)
    assert caught.value.exit_code == 7
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def test_ctrl_c_keeps_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.interrupted_training", str(tmp_path)]
    interrupted = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert interrupted.returncode == 130, interrupted.stderr
    assert "after step 3; nothing was published" in interrupted.stdout
    resumed, whole = (TokenObjective(dropout=DROPOUT) for _ in range(2))
    result = train(resumed, ROWS, HELD_OUT, SETTINGS, tmp_path)
    expected = train(whole, ROWS, HELD_OUT, SETTINGS, tmp_path / "whole")
    assert all(
        torch.equal(a, b) for a, b in zip(weights(resumed).values(), weights(whole).values(), strict=True)
    )
    assert [point.loss for point in result.curve] == [point.loss for point in expected.curve]


def test_a_job_that_ignores_ctrl_c_keeps_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what runs in the background
    try:
        with Interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("change", "kind"), [({"learning_rate": 0.02}, "settings"), ({"rows": token_rows(seed=5)}, "data")]
)
def test_a_checkpoint_of_another_run_is_refused(change: dict[str, Any], kind: str, tmp_path: Path) -> None:
    run(tmp_path, steps=2)
    with pytest.raises(UsageError, match=f"the checkpoint of step 2 was made with other {kind}.*--fresh"):
        run(tmp_path, **{"steps": 2, **change})
    assert run(tmp_path, **{"steps": 2, **change, "fresh": True})[1].steps == 2


def test_no_rows_and_no_parameters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rows"):
        run(tmp_path, rows=TensorRows({"ids": torch.zeros(0, 3, dtype=torch.int64)}))
    frozen = TokenObjective()
    frozen.model.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter"):
        run(tmp_path, frozen)


@pytest.mark.parametrize("values", [{"steps": 0}, {"optimizer": "adam"}, {"clip": -1.0}, {"time": "5"}])
def test_wrong_settings_are_usage_errors(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        from_values(TrainSettings, values)


def test_global_random_numbers_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    run(tmp_path, steps=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_rises_in_the_warmup_and_never_leaves_its_bounds(schedule: str) -> None:
    shares = [i / 100 for i in range(101)]
    factors = [factor(schedule, share, 0.1) for share in shares]
    assert factors[:11] == sorted(factors[:11])
    assert factors[10] == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert all(0 <= each <= 1 for each in factors)


def test_each_schedule_ends_where_it_says() -> None:
    assert factor("cosine", 1.0, 0.1) == pytest.approx(0.1)
    assert factor("linear", 1.0, 0.1) == 0
    assert factor("wsd", 0.8, 0.1) == pytest.approx(1.0)
    assert factor("wsd", 0.9, 0.1) == pytest.approx(0.5)
    assert factor("constant", 1.0, 0.0) == 1
    assert factor("cosine", 0.0, 1.0) > 0
