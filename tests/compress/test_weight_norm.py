"""Weight and spectral normalization: folded into plain weights, which quantize like any other."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from infer import Plan, compress

PLAN = Plan(source="model.pt", quant="int8")


def by_hooks(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return torch.nn.utils.weight_norm(layer)


NORMALIZE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by hooks": by_hooks,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by hooks": torch.nn.utils.spectral_norm,
}


class Vocoder(nn.Module):
    def __init__(self, normalize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up = normalize(nn.ConvTranspose1d(64, 64, 4, stride=2, padding=1))
        self.conv = normalize(nn.Conv1d(64, 64, 3, padding=1))
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(self.up(x).relu()).mT)


@pytest.mark.parametrize("name", NORMALIZE)
def test_a_folded_weight_gives_the_same_numbers_and_is_quantized(name: str) -> None:
    model = Vocoder(NORMALIZE[name]).eval()
    x = torch.randn(2, 64, 9)
    with torch.no_grad():
        expected = model(x)
        compress.fold_weight_norms(model)
        torch.testing.assert_close(model(x), expected)
        assert type(model.up) is nn.ConvTranspose1d
        assert compress.fold_weight_norms(model) == []
        compress.quantize_model(model, PLAN)
        assert compress.cover(model, {}).share > 0.99
        assert float((model(x) - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("name", NORMALIZE)
def test_a_copy_without_values_gets_the_folded_weights(name: str) -> None:
    model = Vocoder(NORMALIZE[name]).eval()
    other = Vocoder(NORMALIZE[name]).eval().to("meta")
    found = compress.fold_weight_norms(model, into=other)
    assert found[0].value == 2
    assert torch.equal(other.up.weight, model.up.weight)
    assert torch.equal(other.conv.bias, model.conv.bias)
    assert other.conv.weight is not model.conv.weight, "a cast of the copy would change the model"
    assert compress.fold_weight_norms(model, into=other) == []


def test_another_parametrization_stays_float_with_a_reason() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    parametrize.register_parametrization(model[0], "weight", Doubled())
    assert compress.fold_weight_norms(model) == []
    assert "parametrized" in compress.quantize_model(model, PLAN).refused["0"]
    coverage = compress.cover(model, {})
    assert coverage.left["Linear"].values == 64 * 64 + 64
