"""float8 linear layers: the operator against its definition in float64, the quantizer, and the product of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.compress.formats import fp8
from infer.plan import Plan

OP = torch.ops.infer.linear_fp8
PLAN = Plan(source="", quant="fp8")


def twin(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """float64 products of what the float8 numbers stand for, row by row."""
    rows = []
    for row in x.double():
        step = row.abs().max().float() / 448
        rows.append(((row.float() / step).to(torch.float8_e4m3fn).double() @ codes.double().T) * step)
    return torch.stack(rows) * scale.double()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 33), (33, 16, 48), (7, 130, 100)], ids=str)
def test_the_operator_equals_its_definition(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    packed, x, bias = fp8.quantize(torch.randn(n, k), None, PLAN), torch.randn(m, k), torch.randn(n)
    want = twin(x, packed["codes"], packed["scale"]) + bias
    got = OP(x, packed["codes"], packed["scale"], bias)
    assert (got - want).norm() <= 1e-6 * want.norm()
    assert OP(x.half()[:, None], packed["codes"], packed["scale"]).shape == (m, 1, n)
    assert OP(x[:0], packed["codes"], packed["scale"], bias).shape == (0, n)
    assert torch.equal(OP(torch.zeros(1, k), packed["codes"], packed["scale"], bias)[0], bias)


def test_nan_stays_in_its_row_of_an_fp8_product() -> None:
    packed, x = fp8.quantize(torch.randn(16, 64), None, PLAN), torch.randn(3, 64)
    clean = OP(x, *packed.values())
    x[1, 5] = float("nan")
    dirty = OP(x, *packed.values())
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
    assert dirty[1].isnan().all()


def test_fp8_weights_keep_three_mantissa_bits() -> None:
    weight = torch.randn(64, 256)
    packed = fp8.quantize(weight, None, PLAN)
    error = (fp8.dequantize(packed) - weight).norm() / weight.norm()
    assert packed["codes"].dtype == torch.float8_e4m3fn
    assert 0.02 < error < 0.03  # uniform rounding of 4 significant bits


def test_fp8_refusals_have_a_reason() -> None:
    assert fp8.missing() is None
    assert fp8.refuses(nn.Linear(128, 128), PLAN) is None
    assert "multiples of 16" in str(fp8.refuses(nn.Linear(100, 128), PLAN))
    assert "Embedding" in str(fp8.refuses(nn.Embedding(100, 128), PLAN))
    assert compress.get(PLAN) is fp8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 48, 160), (17, 4096, 1024), (130, 64, 4096)], ids=str)
def test_fp8_on_a_gpu_equals_fp8_on_the_cpu(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    packed, x, bias = fp8.quantize(torch.randn(n, k), None, PLAN), torch.randn(m, k), torch.randn(n)
    want = OP(x, packed["codes"], packed["scale"], bias)
    got = OP(x.cuda(), packed["codes"].cuda(), packed["scale"].cuda(), bias.cuda()).cpu()
    assert (got - want).norm() <= 4e-3 * want.norm()  # the library's product is rounded to bfloat16
