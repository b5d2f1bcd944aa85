"""Hessians weighed by the gradients of the outputs: against the formula, for embeddings, and what has no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.compress import assign
from infer.compress.assign.assignment import CalibrationSet
from infer.compress.calibration import output_gradients
from infer.errors import NotUsableError
from infer.plan import Plan
from infer.reporter import Reporter
from infer.spec import TensorSpec

WIDTH = 64


class Tied(nn.Module):
    """Embedding, a layer, and a head that shares the embedding's weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embed(input_ids))))


def rows(count: int = 6) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 32, (count, 5), generator=torch.Generator().manual_seed(1))}


def guided(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, compress.Stats]:
    return compress.calibrate(model, batches, hessian=True, outputs=["logits"], task="text-generation")


def by_formula(model: Tied, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the Hessians of the three layers, each output row of a layer weighed alike, from every token alone."""
    ids = inputs["input_ids"].reshape(-1)
    draw = torch.Generator().manual_seed(0)
    embedded = model.embed(ids).detach().requires_grad_()
    before = model.layer(embedded)
    hidden = torch.tanh(before)
    logits = model.head(hidden)
    share = logits.softmax(-1).detach()
    picked = torch.multinomial(share, 1, generator=draw)
    seed = share.scatter_add(1, picked, torch.full_like(share[:, :1], -1))
    to_embedded, to_before = torch.autograd.grad(logits, [embedded, before], seed)
    found = {}
    for name, x, gradient in (("layer", embedded, to_before), ("head", hidden, seed)):
        each = gradient.square().mean(1)
        each = each + output_gradients.EVEN * each.mean()
        found[name] = sum(w * torch.outer(v, v) for w, v in zip(each, x, strict=True))
    found["embed"] = sum(torch.outer(g, g) for g in to_embedded) / 32
    return {name: value.detach() for name, value in found.items()}


def alike(got: Tensor, want: Tensor) -> None:
    """Check equality up to one positive factor, which error feedback does not see."""
    torch.testing.assert_close(
        got / got.diagonal().mean(), want / want.diagonal().mean(), rtol=1e-4, atol=1e-5
    )


def test_hessians_are_those_of_the_formula() -> None:
    model, inputs = Tied(tied=False), rows()
    found, wanted = guided(model, [inputs]), by_formula(model, inputs)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        alike(found[name].hessians[0], want)


def test_a_tied_weight_has_the_hessian_of_both_its_uses() -> None:
    model, inputs = Tied(), rows()
    found, wanted = guided(model, [inputs]), by_formula(model, inputs)
    assert found.keys() == {"layer", "head"}
    alike(found["head"].hessians[0], wanted["head"] + wanted["embed"])


def test_padding_does_not_count() -> None:
    model, inputs = Tied(tied=False), rows()
    padded = {name: torch.cat([value, torch.full_like(value, 7)], 1) for name, value in inputs.items()}
    padded["attention_mask"] = torch.tensor([[1] * 5 + [0] * 5]).expand(6, -1)
    plain = {**inputs, "attention_mask": torch.ones(6, 5, dtype=torch.int64)}
    want, got = guided(model, [plain]), guided(model, [padded])
    for name in ("embed", "layer", "head"):
        alike(got[name].hessians[0], want[name].hessians[0])


def test_rows_of_small_gradients_count_less_than_their_number() -> None:
    x, kept = torch.randn(100, WIDTH), (torch.arange(100) % 10 == 0).float()
    seen = compress.calibrate(Gated(), [{"x": x, "kept": kept}], hessian=True, outputs=["y"], task="tensors")
    each = 10 * kept + output_gradients.EVEN  # the ten rows have about the same gradients
    assert seen["layer"].num_rows == 100
    assert seen["layer"].hessian_rows == pytest.approx(float(each.sum() ** 2 / each.square().sum()), rel=0.1)
    plain = compress.calibrate(Gated(), [{"x": x, "kept": kept}], hessian=True)
    assert plain["layer"].hessian_rows == 100


def test_one_row_at_a_time_has_the_gradients_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Tied(), rows()
    monkeypatch.setattr(output_gradients, "EVEN", 0.0)  # relative to the rows so far
    want = guided(model, [inputs])
    monkeypatch.setattr(output_gradients, "LARGE", 0)
    got = guided(model, [inputs])
    alike(got["layer"].hessians[0], want["layer"].hessians[0])


def test_the_model_is_left_as_it_was() -> None:
    model = Tied().train()
    guided(model, [rows()])
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


class Gated(nn.Module):
    """Only a tenth of the rows reaches the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return self.layer(x) * kept[:, None]


def test_error_feedback_spares_the_rows_that_reach_the_output() -> None:
    mix = torch.randn(2, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) / 8
    kept = (torch.arange(600) % 10 == 0).float()
    x = torch.randn(600, WIDTH, generator=torch.Generator().manual_seed(2))
    x = torch.where(kept[:, None] > 0, x @ mix[0], 4 * x @ mix[1])
    errors = {}
    for way in ("gptq", "guided"):
        outputs = ["y"] if way == "guided" else None
        model, small = Gated(), Gated()
        seen = compress.calibrate(
            model, [{"x": x, "kept": kept}], hessian=True, outputs=outputs, task="tensors"
        )
        compress.quantize_model(small, Plan(source="m", quant="cluster:2"), stats=seen)
        errors[way] = float((small(x, kept) - model(x, kept)).detach().square().sum())
    assert errors["guided"] < 0.8 * errors["gptq"]


class Rounded(nn.Module):
    """Its output has no gradient; where `breaks`, asking for one fails."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.breaks = nn.Linear(WIDTH, WIDTH), breaks

    def forward(self, input: Tensor) -> Tensor:
        y = self.layer(input)
        if self.breaks:
            z = y * 2
            y.add_(1)
            return (z * z).sqrt().nan_to_num() * torch.nan_to_num((y - y).sqrt())
        return y.detach()


def test_a_layer_without_gradient_has_the_plain_hessian() -> None:
    model, x = Rounded(False), {"input": torch.randn(200, WIDTH)}
    plain = compress.calibrate(model, [x], hessian=True)
    found = compress.calibrate(model, [x], hessian=True, outputs=["y"], task="tensors")
    torch.testing.assert_close(found["layer"].hessians[0], plain["layer"].hessians[0])


def test_auto_calibrates_a_model_without_finite_gradients_by_gptq() -> None:
    x = torch.randn(20, WIDTH)
    spec = (TensorSpec("input", "float32", ("batch", WIDTH)),)

    def stats(calibrate: str) -> tuple[object, Reporter]:
        said, plan = Reporter(), Plan(source="m.pt", quant="nf4", calibrate=calibrate)
        known = CalibrationSet(Rounded(True), spec, ("y",), "tensors", {"input": x[:4]}, {"input": x[4:]})
        return assign.collect_statistics(plan, known, said), said

    found, said = stats("auto")
    assert found
    method = next(f for f in said.findings if f.what == "method")
    assert method.value == "gptq"
    assert "gradients at 'layer' are not finite" in method.why
    with pytest.raises(NotUsableError, match="not finite"):
        stats("guided")


def test_an_embedding_keeps_the_static_form_without_calibration() -> None:
    model = Tied(tied=False)
    seen = guided(model, [rows(40)])
    compress.quantize_model(model, Plan(source="m", quant="int8:static"), stats=seen)
    assert "x_scale" not in dict(model.embed.named_buffers(recurse=True))
    assert model(**rows()).isfinite().all()
