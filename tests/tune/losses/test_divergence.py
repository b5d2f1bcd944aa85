"""KL divergence in tiles, and in pieces of rows, against that of whole logits, and its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from infer.tune.losses import divergence, output_head
from infer.tune.losses.divergence import cut_divergence, divergence_twin, row_divergence
from infer.tune.losses.output_head import OutputHead


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "CHUNK", 96)
    monkeypatch.setattr(output_head, "FEWEST_ROWS", 32)


def head(columns: int, dtype: torch.dtype = torch.float32, vocab: int = 100, **more: float) -> OutputHead:
    bias = torch.randn(vocab, dtype=dtype, requires_grad=True)
    return OutputHead(torch.randn(vocab, columns, dtype=dtype, requires_grad=True), bias, **more)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
@pytest.mark.parametrize("tokens", [1, 41])
def test_divergence_and_gradients_equal_those_of_whole_logits(temperature: float, tokens: int) -> None:
    student, teacher = head(16, softcap=6.0), head(24, scale=0.5)
    hidden, wanted = torch.randn(tokens, 16, requires_grad=True), torch.randn(tokens, 24, requires_grad=True)
    given = (hidden, student, wanted, teacher)
    total, count = cut_divergence(*given, temperature=temperature)
    twin, _ = divergence_twin(*given, temperature=temperature)
    assert int(count) == tokens
    torch.testing.assert_close(total, twin, rtol=1e-4, atol=1e-4)
    trained = (hidden, student.weight, student.bias)
    expected = torch.autograd.grad(2 * twin, trained)
    for got, right in zip(torch.autograd.grad(2 * total, trained), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


def test_float64_gradients_pass_torch_gradcheck() -> None:
    student, teacher = head(5, torch.float64, 70, softcap=2.0), head(3, torch.float64, 70)
    hidden = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(3, 3, dtype=torch.float64)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = replace(student, weight=weight, bias=bias)
        return cut_divergence(hidden, own, wanted, teacher, temperature=2.0)[0]

    assert torch.autograd.gradcheck(loss, (hidden, student.weight, student.bias), fast_mode=True)


def test_a_student_equal_to_its_teacher_has_no_divergence_and_no_gradient() -> None:
    own, hidden = head(16), torch.randn(20, 16, requires_grad=True)
    total, _ = cut_divergence(hidden, own, hidden, own)
    assert abs(float(total.detach())) < 1e-3
    assert torch.autograd.grad(total, hidden)[0].abs().max() < 1e-5


def test_only_tokens_of_the_mask_count() -> None:
    student, teacher, mask = head(16), head(16), torch.tensor([[True, False, True], [False, False, True]])
    hidden, wanted = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    hidden[~mask] = torch.nan
    total, count = cut_divergence(hidden, student, wanted, teacher, mask=mask)
    assert int(count) == 3
    torch.testing.assert_close(total, cut_divergence(hidden[mask], student, wanted[mask], teacher)[0])


def test_vocabularies_tokens_and_temperatures_that_do_not_fit_are_refused() -> None:
    hidden = torch.randn(2, 16)
    with pytest.raises(ValueError, match="the student has 100 tokens, the teacher 99"):
        cut_divergence(hidden, head(16), hidden, head(16, vocab=99))
    with pytest.raises(ValueError, match=r"tokens differ: \[2\] and \[3\]"):
        cut_divergence(hidden, head(16), torch.randn(3, 16), head(16))
    with pytest.raises(ValueError, match="temperature above 0, got 0"):
        cut_divergence(hidden, head(16), hidden, head(16), temperature=0)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_row_divergence_and_its_gradient_are_those_of_kl_div(
    rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "PIECE", 100)
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
