"""`torch.compile(model, backend="infer")`: never another answer than the model's."""

from __future__ import annotations

import tomllib
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from infer.live.dynamo_backend import infer_backend
from tests.support.page_blocks import ROOT

OPTIONS = {"backend": "eager", "allow_slower": True, "batches": (1,)}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Model(nn.Module):
    """Weights, a buffer, a size that is computed with, a dict back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.linear = nn.Embedding(100, 64), nn.Linear(64, 96)
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm1d(96)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 96))

    def forward(self, ids):
        hidden = self.norm(self.linear(self.embed(ids).mean(1)) * self.scale)
        image = self.conv(hidden.reshape(ids.shape[0], 1, 8, 12))
        return {"hidden": hidden, "image": image.flatten(1)}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ids(rows: int, length: int = 7) -> torch.Tensor:
    return torch.randint(0, 100, (rows, length))


def compiled(model: nn.Module, **options):
    return torch.compile(model, backend=infer_backend, options={**OPTIONS, **options})


@torch.no_grad()
def assert_same(got, expected) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4)


def test_answers_are_those_of_the_model_at_any_number_of_rows_and_length(monkeypatch) -> None:
    made = []
    from infer.live import dynamo_backend

    compile_model = dynamo_backend.compile_model
    monkeypatch.setattr(
        dynamo_backend, "compile_model", lambda *a, **k: made.append(compile_model(*a, **k)) or made[-1]
    )
    model = Model().eval()
    fast = compiled(model)
    with torch.inference_mode():
        for words in (ids(3), ids(5), ids(5, 9), ids(1)):
            assert_same(fast(words), model(words))
    assert made
    assert not made[0].misses


def test_weight_only_formats_reach_the_layers_of_the_graph(monkeypatch) -> None:
    from infer.live import dynamo_backend

    made, compile_model = [], dynamo_backend.compile_model
    monkeypatch.setattr(
        dynamo_backend, "compile_model", lambda *a, **k: made.append(compile_model(*a, **k)) or made[-1]
    )
    model = Model().eval()
    words = ids(4)
    with torch.inference_mode():
        got, expected = compiled(model, quant="int8:weight", max_error=0.1)(words), model(words)
    for name, value in expected.items():
        error = float((got[name] - value).norm() / value.norm())
        assert 0 < error < 0.05  # rounded, and no more than 8 bits round
    layers = made[0].variants[0].report.layers
    assert sum(layer.format.startswith("int8") for layer in layers) >= 2


def test_gradients_run_the_graph_as_it_is_with_one_warning() -> None:
    model = Model().eval()
    with pytest.warns(UserWarning, match="gradients are on"):
        answer = compiled(model)(ids(3))
    answer["hidden"].sum().backward()
    assert model.linear.weight.grad is not None


def test_a_graph_that_is_refused_runs_as_it_is_with_the_reason() -> None:
    model, words = Model().eval(), ids(3)
    with torch.inference_mode(), pytest.warns(UserWarning, match="runs a graph as it is: .*int9"):
        assert_same(compiled(model, quant="int9")(words), model(words))


def test_weights_that_change_are_noticed() -> None:
    model, words = Model().eval(), ids(3)
    fast = compiled(model)
    with torch.no_grad():
        fast(words)
        model.linear.weight.mul_(3.0)
        with pytest.warns(UserWarning, match="weights were changed"):
            assert_same(fast(words), model(words))


def test_weights_whose_changes_can_not_be_noticed_are_not_compiled() -> None:
    with torch.inference_mode():
        model = Model().eval()
        with pytest.warns(UserWarning, match="made under inference_mode"):
            assert_same(compiled(model)(words := ids(3)), model(words))


def test_a_graph_break_makes_two_graphs() -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)

    def program(x):
        y = first(x)
        torch._dynamo.graph_break()
        return second(y.relu())

    x = torch.randn(4, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = torch.compile(program, backend=partial(infer_backend, options=OPTIONS))(x)
        torch.testing.assert_close(got, program(x), rtol=1e-4, atol=1e-5)


def test_an_installed_infer_is_a_backend_by_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch_dynamo_backends"] == {
        "infer": "infer.live.dynamo_backend:infer_backend"
    }
