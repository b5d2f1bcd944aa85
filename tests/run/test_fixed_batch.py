"""A model whose code makes a constant of the batch is published with a batch of one, and serves any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infer import Plan, Predictor
from infer.run import stages

NET = """
import torch
from torch import nn

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return torch.stack([self.fc(x[i]).relu() for i in range(int(x.shape[0]))])

INPUTS = {"x": "float32[batch,64]"}
def example_inputs(): return {"x": torch.randn(24, 64, generator=torch.Generator().manual_seed(0))}
def build(): torch.manual_seed(0); return Rows()
"""


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_fixed_batch_model_is_published_and_serves_any_rows(tmp_path: Path, quant: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    plan = Plan(
        source=f"{tmp_path}/net.py:build", backend="eager", quant=quant, batches=(), allow_slower=True
    )
    made = stages.optimize(plan, tmp_path / "net.infer")
    assert made.report.limitations[0].startswith("fixed sizes: batch 1 (")
    assert made.report.limitations[0] in made.report.verdict
    space: dict[str, object] = {}
    exec(NET, space)  # noqa: S102
    x = torch.randn(5, 64)
    with Predictor.load(tmp_path / "net.infer") as predictor, torch.no_grad():
        assert predictor.sizes["batch"] == (1, 1)
        expected, got = space["build"]()(x), predictor.predict({"x": x})["output"]
    assert got.shape == (5, 64)
    assert float((got - expected).norm() / expected.norm()) < (1e-5 if quant == "none" else 0.05)
