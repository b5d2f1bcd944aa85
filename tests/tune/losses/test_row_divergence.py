"""KL divergence in pieces of rows against that of torch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from infer.tune.losses import row_divergence as module
from infer.tune.losses.row_divergence import row_divergence


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_row_divergence_and_its_gradient_are_those_of_kl_div(
    rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    make = torch.Generator().manual_seed(rows)
    expected, got = (torch.randn(rows, 19, generator=make) for _ in range(2))
    got.requires_grad_()
    p, q = ((side / temperature).log_softmax(-1) for side in (expected, got))
    want = F.kl_div(q, p, reduction="sum", log_target=True) * temperature**2
    total = row_divergence(expected, got, temperature)
    torch.testing.assert_close(total, want)
    (wanted,) = torch.autograd.grad(3 * want, got)
    (found,) = torch.autograd.grad(3 * total, got)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_excluded_classes_add_nothing_to_row_divergence() -> None:
    expected = torch.tensor([[0.0, 1.0, -torch.inf]])
    got = torch.tensor([[0.5, 0.5, -torch.inf]], requires_grad=True)
    total = row_divergence(expected, got)
    torch.testing.assert_close(total, row_divergence(expected[:, :2], got[:, :2]))
    total.backward()
    assert got.grad is not None
    assert bool(got.grad.isfinite().all())
    assert float(got.grad[0, 2]) == 0


def test_row_divergence_of_bfloat16_logits_is_summed_in_float32() -> None:
    expected, got = torch.randn(8, 300), torch.randn(8, 300).to(torch.bfloat16).requires_grad_()
    total = row_divergence(expected.to(torch.bfloat16), got)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, row_divergence(expected.to(torch.bfloat16).float(), got.float()))
    total.backward()
    assert got.grad is not None
    assert got.grad.dtype == torch.bfloat16
