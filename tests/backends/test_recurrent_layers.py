"""Recurrent layers over any number of steps, on every backend, against torch's own modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer.errors import NotUsableError
from infer.plan import Plan
from tests.support.onnx_models import lowered

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
WIDTH = 12
CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "LSTM without bias": (nn.LSTM, {"bias": False, "batch_first": True}),
    "GRU": (nn.GRU, {"num_layers": 2, "batch_first": True}),
    "GRU both ways, steps first": (nn.GRU, {"bidirectional": True}),
    "RNN tanh": (nn.RNN, {"batch_first": True, "bias": False}),
    "RNN relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True, "batch_first": True}),
}
PROJECTED = (nn.LSTM, {"proj_size": 5, "batch_first": True})
BACKENDS = ["eager", "ort", pytest.param("openvino", marks=pytest.mark.openvino)]
SIZES = ((2, 9), (1, 1), (3, 40))


class Layer(nn.Module):
    """The outputs of a recurrent layer for rows [batch, time, 6], and all its last states."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rnn = kind(6, WIDTH, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.rnn.batch_first
        out, last = self.rnn(x if first else x.transpose(0, 1))
        states = last if isinstance(last, tuple) else (last,)
        return (out if first else out.transpose(0, 1)), *(state.transpose(0, 1) for state in states)


def check(kind: type[nn.RNNBase], options: dict[str, Any], name: str, folder: Path) -> None:
    backend = importlib.import_module(f"backends.{name}")
    if why := backend.missing():
        pytest.skip(why)
    module = Layer(kind, options).eval()
    graph = lowered(module, "x=float32[batch,time,6]", torch.randn(2, 9, 6), folder)
    backend.lower(graph, Plan(source="x", backend=name, device="cpu", dtype="float32"), folder)
    runner = backend.open(folder, "cpu")
    for rows, steps in SIZES:
        x = torch.randn(rows, steps, 6)
        with torch.no_grad():
            want = module(x)
        for got, expected in zip(runner.run({"x": x}).values(), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    runner.close()


@pytest.mark.parametrize(("mode", "states"), [("LSTM", 2), ("GRU", 1), ("RNN_TANH", 1), ("RNN_RELU", 1)])
def test_schema_and_shapes_of_the_operator_agree_with_what_it_computes(mode: str, states: int) -> None:
    gates = {"LSTM": 4, "GRU": 3}.get(mode, 1)
    weights = [torch.randn(gates * WIDTH, n) for n in (6, WIDTH)] * 2
    first = [torch.randn(2, 3, WIDTH)] * states
    for batch_first, shape in ((True, (3, 7, 6)), (False, (7, 3, 6))):
        arguments = (torch.randn(shape), first, weights, mode, False, 1, True, batch_first)
        torch.library.opcheck(
            torch.ops.infer.recurrent.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_a_recurrent_layer_takes_any_number_of_steps(case: str, name: str, tmp_path: Path) -> None:
    check(*CASES[case], name, tmp_path)


@pytest.mark.slow
def test_a_compiled_recurrent_layer_takes_any_number_of_steps(tmp_path: Path) -> None:
    """One operator for all kinds, which eager calls too."""
    check(*CASES["LSTM"], "inductor", tmp_path)


def test_an_lstm_with_projections_takes_any_number_of_steps(tmp_path: Path) -> None:
    check(*PROJECTED, "eager", tmp_path)


@pytest.mark.parametrize("name", BACKENDS[1:])
def test_onnx_has_no_lstm_with_projections(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotUsableError, match=r"no LSTM with projections \(proj_size\).*--backend inductor"):
        check(*PROJECTED, name, tmp_path)
