"""Cross-entropy in tiles against torch's own of whole logits: values, gradients, edge cases, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer import compress
from infer.compress.packed_weight import Packed
from infer.plan import Plan
from infer.tune.losses import output_head
from infer.tune.losses.cut_cross_entropy import cross_entropy_twin, cut_cross_entropy
from infer.tune.losses.output_head import OutputHead
from infer.tune.memory.packed_rows import PackedRows, quantizer_of


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "CHUNK", 96)
    monkeypatch.setattr(output_head, "FEWEST_ROWS", 32)


def float_head(
    vocab: int = 100, columns: int = 16, dtype: torch.dtype = torch.float32, **more: float
) -> OutputHead:
    weight = torch.randn(vocab, columns, dtype=dtype, requires_grad=True)
    return OutputHead(weight, torch.randn(vocab, dtype=dtype, requires_grad=True), **more)


def packed_head(quant: str = "nf4", vocab: int = 100) -> OutputHead:
    plan = Plan(source="model.pt", quant=quant)
    format = compress.get(plan)
    packed = Packed(
        format.quantize(torch.randn(vocab, 64), None, plan), format.dequantize, torch.float32, quant
    )
    return OutputHead(PackedRows.of(packed), quantizer=quantizer_of(packed))


def gradients(head: OutputHead, hidden: Tensor, result: Tensor) -> list[Tensor]:
    wanted = [hidden, *(t for t in (head.trainable_weight, head.bias) if t is not None)]
    return list(torch.autograd.grad(result, wanted))


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("more", [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}])
def test_the_sum_and_its_gradients_equal_torch_cross_entropy(tokens: int, more: dict[str, float]) -> None:
    head = float_head(**more)
    hidden, labels = torch.randn(tokens, 16, requires_grad=True), torch.randint(0, 100, (tokens,))
    labels[tokens // 2] = -100
    total, count = cut_cross_entropy(hidden, head, labels)
    twin, twin_count = cross_entropy_twin(hidden, head, labels)
    assert int(count) == int(twin_count) == tokens - 1
    torch.testing.assert_close(total, twin, atol=1e-4, rtol=1e-5)
    expected = gradients(head, hidden, 3 * twin)
    for got, wanted in zip(gradients(head, hidden, 3 * total), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_float64_gradients_pass_torch_gradcheck() -> None:
    head, labels = float_head(70, 5, torch.float64, scale=0.5, softcap=2.0), torch.tensor([3, -100, 69, 33])
    hidden = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return cut_cross_entropy(hidden, replace(head, weight=weight, bias=bias), labels)[0]

    assert torch.autograd.gradcheck(loss, (hidden, head.weight, head.bias), fast_mode=True)


@pytest.mark.parametrize("quant", ["nf4", "int8", "cluster:3"])
def test_a_packed_head_gives_the_loss_of_its_decoded_rows(quant: str) -> None:
    head, hidden = replace(packed_head(quant), quantizer=None), torch.randn(9, 64, requires_grad=True)
    labels = torch.randint(0, 100, (9,))
    total, _ = cut_cross_entropy(hidden, head, labels)
    twin, _ = cross_entropy_twin(hidden, head, labels)
    torch.testing.assert_close(total, twin)
    torch.testing.assert_close(gradients(head, hidden, total), gradients(head, hidden, twin))


def test_a_packed_head_can_compute_with_the_kernels_of_inference() -> None:
    head, hidden, labels = packed_head(), torch.randn(9, 64, requires_grad=True), torch.randint(0, 100, (9,))
    total, _ = cut_cross_entropy(hidden, head, labels)
    twin, _ = cross_entropy_twin(hidden, head, labels)
    torch.testing.assert_close(total, twin, rtol=0.02, atol=0)
    (got,), (expected,) = gradients(head, hidden, total), gradients(head, hidden, twin)
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_ignored_tokens_change_nothing_even_where_they_are_nan() -> None:
    head, hidden, labels = float_head(), torch.randn(5, 16), torch.tensor([1, -100, 7, -100, 99])
    hidden[1] = torch.nan
    hidden.requires_grad_()
    total, count = cut_cross_entropy(hidden, head, labels)
    assert int(count) == 3
    assert all(bool(g.isfinite().all()) for g in gradients(head, hidden, total))
    assert not gradients(head, hidden, cut_cross_entropy(hidden, head, labels)[0])[0][1].any()


def test_a_nan_in_a_counted_token_makes_the_loss_nan() -> None:
    hidden = torch.randn(3, 16)
    hidden[0, 0] = torch.nan
    assert cut_cross_entropy(hidden, float_head(), torch.tensor([1, 2, 3]))[0].isnan()


def test_no_counted_token_gives_zero_and_zero_gradients() -> None:
    head, hidden = float_head(), torch.randn(2, 16, requires_grad=True)
    total, count = cut_cross_entropy(hidden, head, torch.full((2,), -100))
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert not any(g.any() for g in gradients(head, hidden, total))


def test_labels_and_shapes_that_do_not_fit_are_refused() -> None:
    head, hidden = float_head(), torch.randn(2, 16)
    with pytest.raises(IndexError, match=r"labels from 4 to 100 are not in 0\.\.99"):
        cut_cross_entropy(hidden, head, torch.tensor([4, 100]))
    with pytest.raises(ValueError, match=r"got \[2, 16\]"):
        cut_cross_entropy(hidden, head, torch.tensor([4]))


def test_autocast_multiplies_in_its_dtype_and_sums_in_float32() -> None:
    head, hidden, labels = float_head(), torch.randn(40, 16, requires_grad=True), torch.randint(0, 100, (40,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = cut_cross_entropy(hidden, head, labels)
    twin, _ = cross_entropy_twin(hidden, head, labels)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, twin, rtol=0.01, atol=0)
    assert gradients(head, hidden, total)[0].dtype == torch.float32
