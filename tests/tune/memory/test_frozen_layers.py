"""Frozen packed layers: values of inference, gradients of the decoded weight, and no float weight in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infer import compress
from infer.compress.packed_layers import replacement
from infer.compress.packed_weight import Packed
from infer.errors import NotUsableError
from infer.graph import capture  # noqa: F401  registers what an export needs
from infer.kernels import cpu
from infer.kernels.cpu import build
from infer.kernels.expert_layers import ExpertLinear
from infer.kernels.passes import prepack
from infer.plan import Plan
from infer.tune.memory import frozen_layers as module
from infer.tune.memory.frozen_layers import frozen_linear, frozen_linear_twin, pass_gradients
from infer.tune.memory.packed_rows import PackedRows, quantizer_of

FORMATS = (
    "nf4",
    "nf4:16",
    "int4",
    "fp8",
    "int8",
    "int8:weight",
    "cluster:2",
    "cluster:3",
    "cluster",
    "cluster:6",
)
native = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


def packed_layer(quant: str, layer: nn.Module) -> nn.Module:
    plan = Plan(source="model.pt", quant=quant)
    format = compress.get(plan)
    weight = layer.weight.detach()
    rows = weight.flatten(0, 1) if weight.dim() == 3 else weight
    packed = Packed(format.quantize(rows, None, plan), format.dequantize, torch.float32, quant)
    return replacement(layer, packed, format)


def linear(quant: str, rows: int = 96, columns: int = 128, bias: bool = True) -> nn.Module:
    return packed_layer(quant, nn.Linear(columns, rows, bias=bias))


def run(layer: nn.Module, x: Tensor, forward: str) -> Tensor:
    return frozen_linear(x, PackedRows.of(layer.packed), layer.bias, quantizer_of(layer.packed), forward)


def relative(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("rows", [1, 63])
def test_gradients_equal_those_of_the_decoded_weight(quant: str, rows: int) -> None:
    layer = linear(quant, rows=100)
    x = torch.randn(rows, 128, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    weight = torch.randn(rows, 100)
    expected = frozen_linear_twin(twin, PackedRows.of(layer.packed), layer.bias)
    (expected * weight).sum().backward()
    twin_bias, layer.bias.grad = layer.bias.grad, None
    for forward, bound in (("decoded", 1e-5), ("inference", 0.03)):
        y = run(layer, x, forward)
        assert relative(y, expected) < bound
        x.grad = layer.bias.grad = None
        (y * weight).sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
        torch.testing.assert_close(layer.bias.grad, twin_bias)


@pytest.mark.parametrize("quant", ["nf4", "cluster:3", "int8:weight"])
def test_float64_gradients_pass_torch_gradcheck(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.tune.memory.packed_rows.TILE", 32 * 64)
    layer = linear(quant, rows=70, columns=64).double()
    x = torch.randn(1, 2, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: run(layer, x, "decoded"), (x,), fast_mode=True)


@native
@pytest.mark.parametrize(
    "quant", ["nf4", "nf4:16", "cluster", "cluster:3", "cluster:6", "int8", "int8:weight"]
)
def test_the_forward_of_inference_has_the_bits_of_a_lowered_graph(quant: str) -> None:
    cpu.load()
    layer, x = linear(quant, rows=100).eval(), torch.randn(37, 128)
    rows = ({0: torch.export.Dim("rows", min=1)},)
    lowered = prepack.packed(torch.export.export(layer, (x,), dynamic_shapes=rows)).module()
    with torch.no_grad():
        expected = lowered(x)
        got = run(layer, x, "inference")
    assert torch.equal(got, expected)


def test_autocast_gives_its_dtype_and_gradients_in_the_dtype_of_x() -> None:
    layer, x = linear("nf4"), torch.randn(8, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(layer, x, "decoded")
    y.float().square().sum().backward()
    exact = x.detach().clone().requires_grad_()
    frozen_linear_twin(exact, PackedRows.of(layer.packed), layer.bias).square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert relative(x.grad, exact.grad) < 0.02


def test_a_nan_stays_in_its_row_forward_and_backward() -> None:
    layer, x = linear("nf4", bias=False), torch.randn(4, 128)
    x[1, 5] = torch.nan
    x.requires_grad_()
    for forward in module.FORWARDS:
        y = run(layer, x, forward)
        assert y.isnan().any(1).tolist() == [False, True, False, False]
        grad = torch.ones_like(y)
        grad[2, 0] = torch.nan
        (found,) = torch.autograd.grad(y, x, grad)
        assert found.isnan().any(1).tolist() == [False, False, True, False]


def test_no_rows_and_wrong_columns() -> None:
    layer = linear("nf4")
    for forward in module.FORWARDS:
        x = torch.randn(0, 128, requires_grad=True)
        run(layer, x, forward).sum().backward()
        assert x.grad.shape == (0, 128)
    with pytest.raises(ValueError, match="x has 64 columns, the weight 128"):
        run(layer, torch.randn(1, 64), "decoded")


def test_a_model_trains_through_packed_layers_with_checkpointing() -> None:
    torch.manual_seed(3)
    body = nn.Sequential(linear("nf4", 128, 128), nn.GELU(), linear("cluster:3", 128, 128))
    model = nn.Sequential(nn.Linear(128, 128), body)
    assert pass_gradients(model) == ["1.0", "1.2"]
    x = torch.randn(9, 128)
    model(x).square().sum().backward()
    plain, model[0].weight.grad = model[0].weight.grad, None
    checkpoint(body, model[0](x), use_reentrant=False).square().sum().backward()
    assert torch.equal(model[0].weight.grad, plain)
    assert plain.norm() > 0


def test_a_layer_keeps_no_activation_and_no_float_weight_for_the_backward() -> None:
    kept: list[int] = []
    layer, x = linear("nf4", 256, 256), torch.randn(64, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        y = run(layer, x, "decoded")
    y.sum().backward()
    assert kept == []


@pytest.mark.parametrize("quant", ["nf4", "int8:weight", "cluster:3"])
def test_experts_have_the_gradients_of_their_decoded_weights(quant: str) -> None:
    experts = ExpertLinear(nn.Parameter(torch.randn(4, 96, 64)), transposed=False)
    layer = packed_layer(quant, experts)
    assert pass_gradients(layer, "decoded") == [""]
    x, expert = torch.randn(5, 64, requires_grad=True), torch.tensor([3, 0, 0, 3, 1, 0, 2, 3, 3, 3])
    y = layer(x, expert, 2)
    whole = layer.weight
    twin = torch.stack([whole[e] @ x[i // 2] for i, e in enumerate(expert.tolist())])
    torch.testing.assert_close(y, twin, atol=1e-3, rtol=1e-4)
    weight = torch.randn_like(y)
    (got,) = torch.autograd.grad((y * weight).sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad((twin * weight).sum(), x)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)


def test_layers_without_a_gradient_are_refused_by_name() -> None:
    model = nn.Sequential(packed_layer("int8", nn.Conv2d(16, 16, 3)))
    with pytest.raises(NotUsableError, match=r"1 packed layers have no gradient: 0 \(QuantizedConv: "):
        pass_gradients(model)
