"""Recovery: a quantized model comes nearer to its float original, and nothing but what is small changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.compress.packed_weight import Packed
from infer.errors import NotUsableError, UsageError
from infer.plan import Plan
from infer.tune import training_loop, training_state
from infer.tune.recovery import recover_layers, recovery_settings
from infer.tune.recovery.objectives import RecoveryObjective
from infer.tune.recovery.recover import recover, split_rows
from infer.tune.recovery.recovery_settings import RecoveryBudget
from infer.tune.recovery.trainable_layers import TrainableLayers, original_rows
from infer.tune.training_state import TrainResult
from tests.support.packed_tensors import packed

pytest.importorskip("accelerate")
WIDTH = 64


class Tokens(nn.Module):
    """A tied language model without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(96, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(x + self.down(self.dropout(torch.relu(self.up(self.norm(x))))))


def pair(quant: str, spread: float = 1.0) -> tuple[nn.Module, nn.Module]:
    """Return teacher and student; a smaller `spread` of the embeddings makes the next token less certain."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher = Tokens().eval()
    teacher.embed.weight.data *= spread
    student = copy.deepcopy(teacher)
    compress.quantize_model(student, Plan(source="m.pt", quant=quant))
    return teacher, student


def rows(count: int = 64) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(96, (count, 12), generator=torch.Generator().manual_seed(5))}


def divergence(student: nn.Module, teacher: nn.Module) -> float:
    unseen = {"input_ids": torch.randint(96, (32, 12), generator=torch.Generator().manual_seed(9))}
    with torch.no_grad():
        total, count = RecoveryObjective(student, teacher, ["logits"], "text-generation").loss(unseen)
    return float(total) / int(count)


@pytest.mark.parametrize("quant", ["nf4", "cluster:2"])
def test_recovery_brings_the_packed_model_nearer_to_its_original(quant: str, tmp_path: Path) -> None:
    teacher, student = pair(quant)
    given, before = {n: p.clone() for n, p in teacher.named_parameters()}, divergence(student, teacher)
    shapes = {n: (t.dtype, t.shape) for n, t in packed(student).items()}
    budget = RecoveryBudget(terms=40 * 8 * 12)
    found = recover(student, teacher, rows(), ["logits"], "text-generation", budget, tmp_path)
    assert divergence(student, teacher) < 0.8 * before
    assert {n: (t.dtype, t.shape) for n, t in packed(student).items()} == shapes
    assert all(torch.equal(p, given[n]) for n, p in teacher.named_parameters()), "the original is not changed"
    said = {finding.what: finding.value for finding in found}
    assert float(said["after"]) < float(said["before"])  # type: ignore[arg-type]
    assert said["training rows"] == 56


def test_recovery_of_codes_takes_three_quarters_of_the_divergence(tmp_path: Path) -> None:
    teacher, student = pair("cluster:2", spread=0.25)
    before, codes = divergence(student, teacher), packed(student)
    budget = RecoveryBudget(terms=150 * 16 * 12)
    found = recover(student, teacher, rows(2048), ["logits"], "text-generation", budget, tmp_path)
    assert divergence(student, teacher) < 0.25 * before, "without codes it is 0.49, without ramps 0.28"
    assert not torch.equal(packed(student)["up.packed.codes"], codes["up.packed.codes"])
    said = next(finding for finding in found if finding.what == "codes trained")
    assert (said.value, said.why) == (96 * WIDTH + 4 * WIDTH * WIDTH, "")


def test_a_resumed_recovery_of_codes_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_with_checkpoints(*given: Any, **named: Any) -> TrainResult:
        settings = msgspec.structs.replace(given[3], checkpoint_every=0.0)
        return training_loop.train(*given[:3], settings, *given[4:], **named)

    def recovered(folder: Path) -> dict[str, Tensor]:
        teacher, student = pair("cluster:3", spread=0.25)
        recover(student, teacher, rows(512), ["logits"], "text-generation", budget, folder)
        return packed(student)

    budget, set_progress, calls = (
        RecoveryBudget(terms=64 * 16 * 12),
        TrainableLayers.set_progress,
        iter(range(1000)),
    )

    def interrupted(self: TrainableLayers, share: float) -> None:
        if next(calls) == 45:
            raise KeyboardInterrupt
        set_progress(self, share)

    monkeypatch.setattr(recover_layers, "train", train_with_checkpoints)
    wanted = recovered(tmp_path / "whole")
    monkeypatch.setattr(TrainableLayers, "set_progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recovered(tmp_path / "parts")
    assert next((tmp_path / "parts").glob("step-00000045"))
    got = recovered(tmp_path / "parts")
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def test_codes_stay_where_the_budget_is_short(tmp_path: Path) -> None:
    teacher, student = pair("nf4")
    codes = packed(student)["up.packed.codes"]
    budget = RecoveryBudget(terms=20 * 16 * 12)
    found = recover(student, teacher, rows(), ["logits"], "text-generation", budget, tmp_path)
    assert torch.equal(packed(student)["up.packed.codes"], codes)
    said = next(finding for finding in found if finding.what == "codes trained")
    assert said.value == 0
    assert "about 20 steps" in said.why


def test_codes_stay_where_their_states_have_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = pair("nf4")
    monkeypatch.setattr(recovery_settings.memory, "memory_available", lambda device: 1000)
    budget = RecoveryBudget(terms=70 * 16 * 12)
    found = recover(student, teacher, rows(), ["logits"], "text-generation", budget, tmp_path)
    assert any("GB are free" in finding.why for finding in found)


def test_weights_that_the_teacher_does_not_have_keep_their_codes() -> None:
    teacher, student = pair("nf4")
    with torch.no_grad():
        teacher.up.weight.mul_(-1)  # as a batch norm that was folded into the student may
    del teacher.down
    assert list(original_rows(student, teacher)) == [student.embed.packed]


def test_the_recovered_model_is_what_was_measured(tmp_path: Path) -> None:
    teacher, student = pair("cluster:3")
    budget = RecoveryBudget(terms=20 * 8 * 12)
    found = recover(student, teacher, rows(), ["logits"], "text-generation", budget, tmp_path)
    _, held_out = split_rows(rows())
    with torch.no_grad():
        objective = RecoveryObjective(student, teacher, ["logits"], "text-generation")
        total, count = objective.loss(held_out.tensors)
    after = next(finding.value for finding in found if finding.what == "after")
    assert float(total) / int(count) == pytest.approx(after, rel=1e-4)


def test_a_recovery_that_makes_it_worse_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = pair("nf4")
    before = packed(student)
    monkeypatch.setattr(recovery_settings, "RATE", 3.0)
    budget = RecoveryBudget(terms=6 * 8 * 12)
    found = recover(student, teacher, rows(), ["logits"], "text-generation", budget, tmp_path)
    assert [finding.value for finding in found if finding.what == "dropped"] == [True]
    after = packed(student)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_recovery_that_diverges_ends_at_its_best_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student = pair("cluster:3")
    before = divergence(student, teacher)
    monkeypatch.setattr(recovery_settings, "RATE", 0.3)
    monkeypatch.setattr(training_state, "WINDOW", 3)
    found = recover(
        student, teacher, rows(), ["logits"], "text-generation", RecoveryBudget(terms=60 * 8 * 12), tmp_path
    )
    assert any("the loss diverged" in finding.why for finding in found)
    assert divergence(student, teacher) <= before


def test_encoders_are_judged_by_the_error_of_real_tokens_only() -> None:
    teacher, student = nn.Linear(4, 64), nn.Linear(4, 64)

    class Encoder(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(x)

    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5, dtype=torch.int64)
    mask[:, 3:] = 0
    objective = RecoveryObjective(Encoder(student), Encoder(teacher), ["hidden"], "tensors")
    with torch.no_grad():
        total, count = objective.loss({"x": x, "attention_mask": mask})
        want, got = teacher(x)[:, :3].flatten(0, 1), student(x)[:, :3].flatten(0, 1)
    assert int(count) == 9
    assert float(total) == pytest.approx(float((got - want).square().sum() / want.square().sum() * 9))


def test_formats_without_tables_are_refused_and_left_alone() -> None:
    _, student = pair("int8:weight")
    with pytest.raises(NotUsableError, match="tables or group scales"):
        TrainableLayers(student)
    assert not any(hasattr(m, "trained") for m in student.modules() if isinstance(m, Packed))


def test_recovery_without_rows_is_refused(tmp_path: Path) -> None:
    teacher, student = pair("nf4")
    with pytest.raises(UsageError, match="needs 2 rows"):
        recover(student, teacher, {}, ["logits"], "text-generation", RecoveryBudget(terms=10), tmp_path)


def test_rows_that_choose_the_step_do_not_train() -> None:
    training, held_out = split_rows({"x": torch.arange(20)})
    assert held_out.tensors["x"].tolist() == [0, 8, 16]
    assert sorted([*training.tensors["x"].tolist(), 0, 8, 16]) == list(range(20))
