"""Kinds of layers beside Linear, Embedding and Conv2d: each quantized form against torch's own layer."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.pytorch_utils import Conv1D

from infer import compress
from infer.compress.assign import layer_calls
from infer.compress.calibration.input_statistics import calibrate
from infer.compress.packing.pack_model import quantize_model
from infer.coverage import Coverage
from infer.errors import NotUsableError
from infer.plan import Plan
from infer.weights import in_memory

ALL = ["int8", "int8:weight", "int8:static", "nf4", "int4", "cluster:3"]
# error of the layer's output that the format may cost, on Gaussian weights and inputs
ALLOWED = {
    "int8": 0.03,
    "int8:weight": 0.012,
    "int8:static": 0.04,
    "nf4": 0.13,
    "int4": 0.15,
    "cluster:3": 0.25,
}


class Around(nn.Module):
    def __init__(self, layer: nn.Module, **given: Any) -> None:
        super().__init__()
        self.layer, self.given = layer, given

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, **self.given)


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(3)
    layer = make().eval()
    if isinstance(layer, Conv1D):
        nn.init.normal_(layer.weight, std=0.1)
        nn.init.normal_(layer.bias)
    return layer


CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "Conv1D": (lambda: Conv1D(100, 64), (3, 7, 64), {}),
    "Conv1D one row": (lambda: Conv1D(131, 128), (128,), {}),
    "Conv1d": (lambda: nn.Conv1d(64, 33, 3, padding=1), (2, 64, 17), {}),
    "Conv1d one sample": (lambda: nn.Conv1d(64, 33, 4, stride=3), (64, 23), {}),
    "Conv1d dilated": (lambda: nn.Conv1d(64, 48, 5, dilation=3, padding="same", bias=False), (1, 64, 31), {}),
    "Conv1d groups": (lambda: nn.Conv1d(128, 66, 8, groups=2, stride=4), (2, 128, 41), {}),
    "ConvTranspose2d 2x2": (lambda: nn.ConvTranspose2d(64, 33, 2, stride=2), (2, 64, 5, 3), {}),
    "ConvTranspose2d 4x4": (lambda: nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1), (2, 64, 3, 7), {}),
    "ConvTranspose2d odd": (
        lambda: nn.ConvTranspose2d(
            64, 17, (3, 5), stride=(3, 2), padding=(1, 0), output_padding=(2, 1), dilation=(2, 1), bias=False
        ),
        (2, 64, 3, 4),
        {},
    ),
    "ConvTranspose2d output size": (
        lambda: nn.ConvTranspose2d(64, 16, 3, stride=2, padding=1),
        (2, 64, 4, 4),
        {"output_size": [8, 8]},
    ),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(128, 64, 8, stride=4, padding=2), (2, 128, 9), {}),
    "ConvTranspose1d one sample": (lambda: nn.ConvTranspose1d(64, 64, 2, stride=2), (64, 5), {}),
}
TABLES_REFUSE = {name for name in CASES if name.startswith("Conv1d")}


def quantized(model: nn.Module, name: str, x: Tensor) -> nn.Module:
    small = copy.deepcopy(model)
    stats = calibrate(small, [{"x": x}]) if name.endswith("static") else None
    compress.quantize_model(small, Plan(source="model.pt", quant=name), stats=stats)
    return small


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", CASES)
def test_a_quantized_layer_is_close_to_torch(case: str, name: str) -> None:
    make, shape, given = CASES[case]
    model, x = Around(seeded(make), **given), torch.randn(shape)
    if name in ("nf4", "int4") and case in TABLES_REFUSE:
        with pytest.raises(NotUsableError, match="shrinks Linear"):
            quantized(model, name, x)
        return
    small = quantized(model, name, x)
    with torch.no_grad():
        expected, got = model(x), small(x)
        exact = Around(copy.deepcopy(model.layer), **given)
        assert small.layer.weight.shape == exact.layer.weight.shape
        exact.layer.weight.copy_(small.layer.weight)
        assert error(got, expected) < ALLOWED[name]
        if name in ("int8:weight", "nf4", "int4", "cluster:3"):  # the weight is all that differs
            assert error(got, exact(x)) < 1e-5


@pytest.mark.parametrize(
    "case", ["Conv1D", "Conv1d", "ConvTranspose2d 2x2", "ConvTranspose2d 4x4", "ConvTranspose1d"]
)
def test_a_quantized_layer_exports_with_symbolic_sizes(case: str) -> None:
    make, shape, _ = CASES[case]
    small = quantized(Around(seeded(make)), "int8", torch.randn(shape))
    last = len(shape) - (2 if case == "Conv1D" else 1)
    program = torch.export.export(
        small,
        (torch.randn(shape),),
        dynamic_shapes=({0: Dim("batch", max=8), last: Dim("length", min=2, max=64)},),
    )
    longer = list(shape)
    longer[0], longer[last] = 5, shape[last] + 4
    x = torch.randn(longer)
    torch.testing.assert_close(program.module()(x), small(x))


def test_weights_stored_by_columns_are_read_from_a_checkpoint() -> None:
    model = nn.Sequential(
        seeded(lambda: Conv1D(100, 64)), seeded(lambda: nn.ConvTranspose1d(64, 64, 2, stride=2))
    )
    plan = Plan(source="model.pt", quant="int8")
    checkpoint = in_memory({name: tensor.clone() for name, tensor in model.state_dict().items()})
    on_meta = copy.deepcopy(model).to("meta")
    quantize_model(model, plan)
    quantize_model(on_meta, plan, checkpoint=checkpoint)
    for mine, read in zip(model, on_meta, strict=True):
        assert torch.equal(mine.packed.codes, read.packed.codes)
        assert torch.equal(mine.packed.scale, read.packed.scale)
        assert mine.packed.codes.is_contiguous()


def test_a_weight_shared_by_two_layer_kinds_stays_float() -> None:
    model = nn.ModuleList([nn.Linear(64, 64), seeded(lambda: Conv1D(64, 64)), nn.Linear(64, 64)])
    model[1].weight = model[0].weight
    found = compress.quantize_model(model, Plan(source="model.pt", quant="int8"))
    assert type(model[0]) is nn.Linear
    assert "in different ways" in found.refused["0"]


def test_transposed_convolutions_in_groups_stay_float_with_the_reason() -> None:
    model = nn.ModuleList([nn.ConvTranspose2d(64, 64, 3, groups=2), nn.Linear(64, 64)])
    found = compress.quantize_model(model, Plan(source="model.pt", quant="int8"))
    assert "groups=2" in found.refused["0"]


def test_error_feedback_lowers_the_error_of_every_kind() -> None:
    for case in ("Conv1D", "Conv1d", "ConvTranspose2d 4x4"):
        make, shape, _ = CASES[case]
        model = Around(seeded(make))
        mixing = torch.randn(64, 64) * torch.logspace(0, -2, 64)
        axis = -1 if case == "Conv1D" else 1
        x = (torch.randn(64, *shape[1:]).movedim(axis, -1) @ mixing).movedim(-1, axis)
        plan = Plan(source="model.pt", quant="nf4" if case != "Conv1d" else "cluster:3")
        errors = []
        for stats in (None, calibrate(model, [{"x": x}], hessian=True)):
            small = copy.deepcopy(model)
            quantize_model(small, plan, stats=stats)
            with torch.no_grad():
                errors.append(error(small(x), model(x)))
        assert errors[1] < 0.9 * errors[0], case


def test_gpt2_is_quantized_as_a_whole() -> None:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model = GPT2Model(config).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    reasons = compress.quantize_model(model, Plan(source="model.pt", quant="int8")).refused
    coverage: Coverage = compress.cover(model, reasons)
    assert coverage.share > 0.98
    with torch.no_grad():
        assert error(model(ids).last_hidden_state, expected) < 0.02


def test_calibration_rows_of_gpt2_conv1d_layers_are_counted() -> None:
    model = Around(seeded(lambda: Conv1D(100, 64)))
    seen = layer_calls.count_calls(model, [model.layer], [{"x": torch.randn(3, 7, 64)}])
    assert seen == {id(model.layer): [{(21, 64): 1}]}


@pytest.mark.parametrize("family", ["gemma3.Gemma3Text", "bart.Bart"])
def test_a_scaled_embedding_is_packed_with_the_head_that_it_is_tied_to(family: str) -> None:
    folder, name = family.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    table = getattr(module, f"{name}ScaledWordEmbedding")(80, 64, 0, embed_scale=8.0)
    head = nn.Linear(64, 80, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    ids = torch.tensor([[3, 0, 79]])
    expected = table(ids).detach(), model(ids).detach()
    quantize_model(model, Plan(source="test", quant="int8:weight"))
    assert type(model[0]).__name__ == "QuantizedEmbedding"
    assert model[0].packed is model[1].packed
    for got, exact in zip((model[0](ids), model(ids)), expected, strict=True):
        assert float((got - exact).norm() / exact.norm()) < 0.02
    program = torch.export.export(model, (ids,))
    torch.testing.assert_close(program.module()(ids), model(ids))
