"""Programs that write into their operands: the same numbers after capture and on packed kernels, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.errors import NotUsableError
from infer.graph import capture
from infer.kernels import cpu
from infer.kernels.passes import prepack
from infer.plan import Plan
from infer.spec import TensorSpec

SPEC = (TensorSpec("x", "float32", ("batch", 5, 64)),)


class Model(nn.Module):
    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(64))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def renamed(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    y.relu_()
    z = m.second(y)
    z += 3
    z.mul_(2)
    return m.third(z)


def copied(m: Model, x: Tensor) -> Tensor:
    z = m.second(m.first(x).relu())
    kept = z.clone()
    kept.add_(5)
    return m.third(z) + kept


def viewed(m: Model, x: Tensor) -> Tensor:
    z = m.second(m.first(x).relu())
    z[:, 0] = 1.0
    half = z[..., :32]
    half.mul_(3)
    return m.third(z)


def promoted(m: Model, x: Tensor) -> Tensor:
    z = m.second(m.first(x).relu())
    z.add_(torch.ones(64, dtype=torch.float64))
    return m.third(z)


def counted(m: Model, x: Tensor) -> Tensor:
    m.seen.add_(1)
    return m.third(m.second(m.first(x).relu()))


def overwritten(m: Model, x: Tensor) -> Tensor:
    m.seen.copy_(x[0, 0])
    return m.third(m.second(m.first(x).relu()) + m.seen)


def input_changed(m: Model, x: Tensor) -> Tensor:
    x.add_(1)
    return m.third(m.second(m.first(x).relu()))


def remembered(m: Model, x: Tensor) -> Tensor:
    m.seen.add_(1)
    return m.third(m.second(m.first(x).relu()) + m.seen)


BODIES = [renamed, copied, viewed, promoted, counted, overwritten, input_changed]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_place_operators_give_the_numbers_of_the_module(body: Callable[..., Tensor]) -> None:
    if reason := cpu.why_not():
        pytest.skip(reason)
    model = Model(body).eval()
    compress.quantize_model(model, Plan(source="x", quant="int8"))
    samples = torch.randn(4, 5, 64)
    graph = capture.capture(model, SPEC, {"x": samples.clone()})
    for rows in (1, 3, 4):
        x = samples[:rows].clone()
        with torch.no_grad():
            expected = copy.deepcopy(model)(x.clone())
            for program in (graph.exported, prepack.packed(graph.exported)):
                got = program.module()(x=x)
                torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)
                torch.testing.assert_close(x, samples[:rows])  # inputs stay as they were


def test_an_output_that_depends_on_earlier_calls_is_refused() -> None:
    with pytest.raises(NotUsableError, match=r"buffer 'seen' .* requests before"):
        capture.capture(Model(remembered).eval(), SPEC, {"x": torch.randn(4, 5, 64)})
    assert not Model(remembered).seen.any()


def test_an_in_place_activation_keeps_the_operators_of_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
    spec = (TensorSpec("input", "float32", ("batch", 3, 8, 8)),)
    graph = capture.capture(model, spec, {"input": torch.randn(2, 3, 8, 8)})
    calls = [str(n.target) for n in graph.exported.graph.nodes if n.op == "call_function"]
    assert calls == ["aten.conv2d.default", "aten.batch_norm.default", "aten.relu.default"]


def test_inputs_of_a_model_that_mutates_them_are_preserved() -> None:
    def doubled(m: Model, x: Tensor) -> Tensor:
        x.mul_(2)
        return m.third(m.second(m.first(x)))

    model, rows = Model(doubled), torch.randn(4, 5, 64)
    before = rows.clone()
    graph = capture.capture(model, SPEC, {"x": rows}, sizes={"batch": (1, 8)})
    with torch.no_grad():
        first, second = model(x=rows), model(x=rows)
    assert torch.equal(rows, before)
    assert torch.equal(first, second)
    torch.testing.assert_close(graph.run({"x": rows})[graph.outputs[0].name], first)
