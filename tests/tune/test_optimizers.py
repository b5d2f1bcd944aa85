"""Optimizers by name: which parameters each one gets, 8-bit states, and fallbacks that are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infer.tune import checkpoints, optimizers
from infer.tune.optimizers import build_optimizers, trainable
from infer.tune.settings import TrainSettings
from infer.tune.training_state import TrainState


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 10))


def test_muon_gets_matrices_and_adamw_the_rest() -> None:
    model = network()
    (muon, adamw), findings = build_optimizers(model, TrainSettings(optimizer="muon", weight_decay=0.1))
    assert [tuple(each.shape) for group in muon.param_groups for each in group["params"]] == [
        (96, 64),
        (10, 96),
    ]
    rest = {
        tuple(each.shape): group["weight_decay"] for group in adamw.param_groups for each in group["params"]
    }
    assert rest == {(10, 64): 0.1, (96,): 0.0, (10,): 0.0}
    assert findings == []


def test_paged_states_without_a_gpu_are_8_bit_and_reported() -> None:
    pytest.importorskip("bitsandbytes")
    (made,), (finding,) = build_optimizers(network(), TrainSettings(optimizer="paged-adamw8bit"))
    assert type(made).__name__ == "AdamW8bit"
    assert "this runs on cpu" in finding.why


def test_without_bitsandbytes_states_are_float32_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    (made,), (finding,) = build_optimizers(network(), TrainSettings(optimizer="adamw8bit"))
    assert type(made) is torch.optim.AdamW
    assert (finding.value, "is not installed" in finding.why) == ("adamw", True)


def step(model: nn.Module, made: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    made.step()


def test_8_bit_states_are_restored_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = TrainSettings(optimizer="adamw8bit")
    model, other = network(), network()
    (made,), (anew,) = build_optimizers(model, settings)[0], build_optimizers(other, settings)[0]
    step(model, made, 1)
    assert made.state[model[1].weight]["state1"].dtype == torch.uint8
    tensors = checkpoints.run_tensors(trainable(model), [made])
    checkpoints.save_checkpoint(tmp_path, TrainState(step=1), tensors)
    found = checkpoints.load_checkpoint(tmp_path, {})
    assert found is not None
    checkpoints.restore(trainable(other), [anew], found[1])
    for seed in (2, 3):
        step(model, made, seed)
        step(other, anew, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
