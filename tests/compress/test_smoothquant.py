"""Balancing of static int8: kept where it lowers what a layer loses, the same weight behind it, ties and blocks too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.compress.calibration.input_statistics import calibrate
from infer.compress.calibration.smoothquant import balance, balance_rows
from infer.compress.formats import int8
from infer.compress.packed_layers import QuantizedLinear
from infer.kernels.ops.linear_packed import int8_twin
from infer.plan import Plan

PLAN = Plan(source="m.pt", quant="int8:static")


def outliers(rows: int = 1024, columns: int = 96) -> Tensor:
    """Draw inputs with a few columns large in every row, as behind a layer norm."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[:, ::24] *= 60
    return x


def lost(layer: nn.Module, small: nn.Module, x: Tensor) -> float:
    want = layer(x)
    return float((small(x) - want).detach().norm() / want.detach().norm())


def model_and_small(x: Tensor, hessian: bool) -> tuple[nn.Sequential, nn.Sequential]:
    """Build a float and a quantized model whose weights are small at the large columns, as after training."""
    torch.manual_seed(0)
    model, small = (nn.Sequential(nn.Linear(96, 80)) for _ in range(2))
    with torch.no_grad():
        model[0].weight[:, ::24] /= 60
    small.load_state_dict(model.state_dict())
    stats = calibrate(model, [{"input": part} for part in x.split(256)], hessian=hessian)
    compress.quantize_model(small, PLAN, stats=stats)
    return model, small


@pytest.mark.parametrize("hessian", [False, True])
def test_balancing_halves_the_error_of_inputs_with_large_columns(hessian: bool, monkeypatch) -> None:
    x, unseen = outliers(2048).split(1024)
    model, balanced = model_and_small(x, hessian)
    assert isinstance(balanced[0], QuantizedLinear)
    assert "x_multiplier" in balanced[0].packed.tensors()
    monkeypatch.setattr(
        "infer.compress.calibration.layer_statistics.balance", lambda rows, weight, step: None
    )
    assert lost(model, balanced, unseen) < 0.5 * lost(model, model_and_small(x, hessian)[1], unseen)


class Readers(nn.Module):
    """Two layers that read one input, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(96, n) for n in (80, 48, 80))
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight[:, ::24] /= 60

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.third(x.sign()) + self.second(x).sum(-1, keepdim=True)


@pytest.mark.parametrize("hessian", [False, True])
def test_dynamic_layers_with_one_input_share_a_smoothquant_balance(hessian: bool) -> None:
    x, unseen = outliers(2048).split(1024)
    model, small = Readers(), Readers()
    stats = calibrate(model, [{"x": part} for part in x.split(256)], hessian=hessian)
    compress.quantize_model(small, Plan(source="m.pt", quant="int8"), stats=stats)
    first, second, third = (getattr(small, n).packed.tensors() for n in ("first", "second", "third"))
    assert torch.equal(first["x_multiplier"], second["x_multiplier"])
    assert "x_multiplier" not in third
    plain = int8.quantize(model.first.weight.detach(), None, Plan(source="m.pt", quant="int8"))
    want = model.first(unseen)
    losses = [
        float((int8_twin(rows, tensors["codes"], tensors["scale"], model.first.bias) - want).detach().norm())
        for rows, tensors in ((unseen * first["x_multiplier"], first), (unseen, plain))
    ]
    assert losses[0] < 0.5 * losses[1]


def test_dynamic_layers_without_inputs_or_gain_are_not_balanced() -> None:
    make = torch.Generator().manual_seed(0)
    x, weight = torch.randn(128, 96, generator=make), torch.randn(80, 96, generator=make)
    for feedback in (False, True):
        assert balance_rows(x, [weight], feedback=feedback) is None
    assert balance_rows(torch.empty(0, 96), [weight], feedback=False) is None
    assert balance_rows(x, [], feedback=False) is None
    assert balance_rows(torch.zeros(4, 96), [weight], feedback=False) is None


def test_inputs_of_even_columns_are_not_balanced() -> None:
    make = torch.Generator().manual_seed(0)
    x, weight = torch.randn(128, 96, generator=make), torch.randn(80, 96, generator=make)
    assert balance(x, weight, x.abs().amax() / 127) is None


def test_decoding_a_balanced_weight_gives_the_weight() -> None:
    model, small = model_and_small(outliers(), False)
    weight, got = model[0].weight.detach(), small[0].weight
    assert float((weight - got).norm() / weight.norm()) < 0.02
    ids = torch.tensor([3, 0])
    torch.testing.assert_close(int8.embedding(ids, small[0].packed.tensors()), got[ids])


def test_zero_or_empty_inputs_and_zero_weights_are_not_balanced() -> None:
    step = torch.ones(())
    assert balance(torch.zeros(4, 8), torch.randn(3, 8), step) is None
    assert balance(torch.empty(0, 8), torch.randn(3, 8), step) is None
    assert balance(torch.randn(4, 8), torch.zeros(3, 8), step) is None


def test_the_first_block_of_rows_decides_for_all() -> None:
    layer = nn.Linear(96, 80)
    stats = calibrate(nn.Sequential(layer), [{"input": outliers()}])["0"]
    parts = [int8.quantize(part, stats, PLAN) for part in layer.weight.detach().split(32)]
    assert all(torch.equal(part["x_multiplier"], parts[0]["x_multiplier"]) for part in parts)
    whole = int8.dequantize(compress.join(int8, parts))
    assert float((whole - layer.weight).detach().norm() / layer.weight.detach().norm()) < 0.1
