"""Layers whose outputs recovery compares besides those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from infer.tune.recovery import recover as stage
from infer.tune.recovery.objectives import RecoveryObjective, compared_layers
from infer.tune.recovery.recovery_settings import RecoveryBudget

WIDTH, TOKENS = 64, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Encoder(nn.Module):
    """Mean of the hidden states of a row, or all of them, or class scores."""

    def __init__(self, gives: str, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(96, WIDTH), nn.ModuleList(Block() for _ in range(depth))
        self.head, self.gives = nn.Linear(WIDTH, 4), gives

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        if self.gives == "states":
            return x
        weight = attention_mask[..., None].to(x.dtype)
        mean = (x * weight).sum(1) / weight.sum(1)
        return self.head(mean) if self.gives == "scores" else mean


def rows(count: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(96, (count, TOKENS), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("gives", "names", "task", "depth", "count"),
    [
        ("mean", ["embedding"], "feature-extraction", 3, 3),
        ("states", ["last_hidden_state"], "feature-extraction", 3, 0),  # says as much as a layer
        ("scores", ["logits"], "text-classification", 3, 0),  # another unit
        ("mean", ["embedding"], "feature-extraction", 1, 0),  # no list of layers
    ],
)
def test_layers_are_compared_where_outputs_are_few_numbers(
    gives: str, names: list[str], task: str, depth: int, count: int
) -> None:
    student, teacher = Encoder(gives, depth), Encoder(gives, depth)
    found = compared_layers(student, teacher, rows(1), names, task)
    assert (0 if found is None else len(found[0])) == count
    if found is not None:
        assert found == (list(student.layers), list(teacher.layers))


@torch.no_grad()
def test_compared_layers_enter_the_loss_and_not_the_measure() -> None:
    torch.manual_seed(0)
    teacher, student = Encoder("mean"), Encoder("mean")
    batch, task = rows(4), "feature-extraction"
    plain = RecoveryObjective(student, teacher, ["embedding"], task)
    pairs = compared_layers(student, teacher, batch, ["embedding"], task)
    assert pairs is not None
    both = RecoveryObjective(student, teacher, ["embedding"], task, hidden=1.0, layers=pairs)
    assert float(both.loss(batch)[0]) > float(plain.loss(batch)[0]) * 1.1
    assert torch.equal(both.measure(batch)[0], plain.measure(batch)[0])
    both.compared.release()
    assert torch.equal(both.loss(batch)[0], plain.loss(batch)[0])
    hooks = [len(m._forward_hooks) for model in (student, teacher) for m in model.modules()]
    assert not any(hooks)


def test_a_failed_recovery_leaves_no_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(stage, "measure_model", fail)
    teacher, student = Encoder("mean"), Encoder("mean")
    budget = RecoveryBudget(terms=8)
    with pytest.raises(RuntimeError, match="planted"):
        stage.recover(student, teacher, rows(), ["embedding"], "feature-extraction", budget, tmp_path)
    assert not any(m._forward_hooks for model in (student, teacher) for m in model.modules())
