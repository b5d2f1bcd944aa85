"""Rows whose statistics calibrate a model: how many, and how long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infer.compress.assign import calibration_rows
from infer.compress.assign.calibration_rows import (
    RECOVERY_TOKENS_PER_COLUMN,
    TOKENS_PER_COLUMN,
    more_batches,
    real_lengths,
)
from infer.compress.calibration.input_statistics import calibrate

WIDTH, TOKENS = 64, 16


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.linear(self.embed(input_ids)) * attention_mask[..., None]


def texts(count: int) -> dict[str, Tensor]:
    lengths = torch.arange(count) % TOKENS + 1
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return {"input_ids": torch.arange(count)[:, None].expand(-1, TOKENS) % 96 * mask, "attention_mask": mask}


def test_a_model_that_is_one_layer_runs_and_has_no_layers_to_calibrate() -> None:
    assert calibrate(nn.Linear(4, 4), [{"input": torch.ones(2, 4)}]) == {}


def test_lengths_count_up_to_the_last_real_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert real_lengths(mask).tolist() == [2, 3, 1, 4]


@pytest.mark.parametrize(
    ("recover", "per_column"), [("", TOKENS_PER_COLUMN), ("10000000", RECOVERY_TOKENS_PER_COLUMN)]
)
def test_rows_have_the_tokens_that_the_widest_layer_needs(recover: str, per_column: int) -> None:
    training = texts(2000)
    batches = more_batches(Encoder(), training, texts(8), "feature-extraction", recover, 8)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert 0.9 <= tokens / (per_column * WIDTH) <= 1.2
    for batch in batches:
        lengths = real_lengths(batch["attention_mask"])
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        assert batch["input_ids"].shape[1] - int(lengths.max()) < 8


@pytest.mark.parametrize(
    ("training", "recover", "rows"),
    [
        (2000, "100", 20),  # a fifth of the budget, of a model that counts rows
        (2000, "10", 8),  # never less than without recovery
        (5, "10000000", 5),  # all there are
    ],
)
def test_rows_keep_within_the_budget_and_what_there_is(training: int, recover: str, rows: int) -> None:
    batches = more_batches(Encoder(), texts(training), texts(8), "feature-extraction", recover, 8)
    assert sum(len(batch["input_ids"]) for batch in batches) == rows


@pytest.mark.parametrize(("multiplications", "rows"), [(1e4, 8), (20 * 8.5 * WIDTH * WIDTH, 20)])
def test_rows_keep_within_their_multiplications(
    multiplications: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_rows, "MULTIPLICATIONS", multiplications)
    batches = more_batches(Encoder(), texts(2000), texts(8), "feature-extraction", "", 8)
    assert sum(len(batch["input_ids"]) for batch in batches) == rows


def test_rows_of_other_shapes_are_not_cut() -> None:
    rows = {"x": torch.randn(40, 3, 8)}

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    batches = more_batches(Model(), rows, {"x": rows["x"][:4]}, "tensor", "1000", 4)
    assert [batch["x"].shape for batch in batches] == [(4, 3, 8)]
