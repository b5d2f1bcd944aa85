"""LSTM, GRU and RNN with packed weights: against torch's own modules, from a checkpoint, and down the whole street."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infer import Plan, Predictor, compress
from infer.compress.layer_kinds import Matrix
from infer.coverage import Coverage
from infer.errors import NotUsableError
from infer.graph.capture import capture
from infer.run import stages
from infer.spec import TensorSpec
from infer.weights import in_memory

WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "LSTM two layers both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "LSTM projected": (nn.LSTM, {"proj_size": 64, "hidden_size": 192, "batch_first": True}),
    "LSTM without bias": (nn.LSTM, {"bias": False, "dropout": 0.5, "num_layers": 2}),
    "GRU": (nn.GRU, {"batch_first": True}),
    "GRU both ways": (nn.GRU, {"bidirectional": True}),
    "RNN tanh": (nn.RNN, {"num_layers": 2}),
    "RNN relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True, "batch_first": True}),
}
ALLOWED = {"int8": 0.02, "int8:weight": 0.02, "int8:static": 0.02, "nf4": 0.2, "cluster:3": 0.4}


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def tagger(case: str) -> Tagger:
    torch.manual_seed(5)
    kind, options = CASES[case]
    return Tagger(kind(WIDTH, **{"hidden_size": 128, **options})).eval()


def quantized(model: nn.Module, name: str) -> nn.Module:
    small = copy.deepcopy(model)
    compress.split_recurrent(small)
    compress.quantize_model(small, Plan(source="model.pt", quant=name), stats={})
    return small


def matrices(layer: nn.Module) -> list[str]:
    return [n for n, p in layer.named_parameters() if p.dim() == 2]


@pytest.mark.parametrize("case", CASES)
def test_splitting_recurrent_weights_is_exact(case: str) -> None:
    model = tagger(case)
    split = copy.deepcopy(model)
    names = compress.split_recurrent(split)
    assert set(names.values()) == {f"rnn.{name}" for name in matrices(model.rnn)}
    assert all(name in dict(split.named_parameters()) for name in names)
    x = torch.randn(3, 5, WIDTH)
    with torch.no_grad():
        assert torch.equal(split(x), model(x))
        for mine, theirs in zip(split.rnn(x[0])[1:], model.rnn(x[0])[1:], strict=True):  # one sequence
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("case", CASES)
def test_a_quantized_layer_is_torchs_own_on_decoded_weights(case: str, name: str) -> None:
    model = tagger(case)
    small = quantized(model, name)
    decoded = copy.deepcopy(model)
    with torch.no_grad():
        for weight in matrices(model.rnn):
            packed = getattr(small.rnn, weight)
            assert packed.packed.tensors()["codes"].element_size() == 1
            getattr(decoded.rnn, weight).copy_(packed())
        x = torch.randn(2, 7, WIDTH)
        torch.testing.assert_close(small(x), decoded(x))
        error = (small(x) - model(x)).norm() / model(x).norm()
    assert float(error) < ALLOWED[name]


def test_initial_and_final_states_of_recurrent_layers_are_kept() -> None:
    model = tagger("LSTM two layers both ways")
    small = quantized(model, "int8")
    x, state = torch.randn(3, 4, WIDTH), (torch.randn(4, 3, 128), torch.randn(4, 3, 128))
    with torch.no_grad():
        for mine, theirs in zip(small.rnn(x, state)[1], model.rnn(x, state)[1], strict=True):
            assert float((mine - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("case", ["LSTM two layers both ways", "GRU", "RNN relu"])
def test_a_recurrent_layer_exports_as_one_operator(case: str) -> None:
    small = quantized(tagger(case), "int8")
    axes = "[batch,time," if small.rnn.batch_first else "[time,batch,"
    x = torch.randn(2, 5, WIDTH)
    graph = capture(small, (TensorSpec.parse(f"x=float32{axes}{WIDTH}]"),), {"x": x})
    called = [str(n.target) for n in graph.exported.graph.nodes if n.op == "call_function"]
    assert called.count("infer.recurrent.default") == 1
    more = torch.randn(6, 9, WIDTH)
    torch.testing.assert_close(graph.callable()(x=more)[0], small(more))


def test_weights_are_read_from_a_checkpoint_under_their_old_names() -> None:
    model = tagger("GRU")
    checkpoint = in_memory({name: tensor.clone() for name, tensor in model.state_dict().items()})
    on_meta = copy.deepcopy(model).to("meta")
    renames = compress.split_recurrent(on_meta)
    compress.quantize_model(
        on_meta, Plan(source="model.pt", quant="int8"), checkpoint=checkpoint, renames=renames
    )
    small = quantized(model, "int8")
    for name in matrices(model.rnn):
        assert torch.equal(getattr(on_meta.rnn, name).packed.codes, getattr(small.rnn, name).packed.codes)


def test_shared_layers_and_shared_weights_stay_shared() -> None:
    first, second = nn.GRU(WIDTH, 128), nn.GRU(WIDTH, 128)
    second.weight_ih_l0 = first.weight_ih_l0
    model = nn.ModuleList([first, first, second])
    compress.split_recurrent(model)
    compress.quantize_model(model, Plan(source="model.pt", quant="int8"))
    assert model[0] is model[1]
    assert model[0].weight_ih_l0.packed is model[2].weight_ih_l0.packed
    assert model[0].weight_hh_l0.packed is not model[2].weight_hh_l0.packed


def test_float_parts_of_a_recurrent_layer_are_counted_by_its_name() -> None:
    model = nn.Sequential(nn.LSTM(100, 100), nn.Linear(128, 128))
    compress.split_recurrent(model)
    reasons = compress.quantize_model(model, Plan(source="model.pt", quant="nf4")).refused
    coverage: Coverage = compress.cover(model, reasons)
    assert coverage.left["LSTM"].values == 2 * 400 * 100 + 2 * 400
    assert "weight has 100 columns" in coverage.left["LSTM"].reason
    with pytest.raises(NotUsableError, match="fp8 shrinks Linear layers, not LSTM"):
        compress.quantize_model(nn.ModuleList([Matrix(nn.Parameter(torch.ones(64, 64)), "LSTM")]), PLAN_FP8)


PLAN_FP8 = Plan(source="model.pt", quant="fp8")
FILE = """
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(100, 64)
            self.rnn = nn.GRU(64, 128, bidirectional=True, batch_first=True)
            self.tags = nn.Linear(256, 10)

        def forward(self, ids):
            return self.tags(self.rnn(self.words(ids))[0])

    def build():
        torch.manual_seed(0)
        return Tagger()
"""


@pytest.mark.parametrize("backend", ["eager", pytest.param("ort", marks=pytest.mark.slow)])
def test_a_tagger_is_quantized_completely(backend: str, tmp_path: Path) -> None:
    (tmp_path / "tagger.py").write_text(textwrap.dedent(FILE))
    plan = Plan(
        source=f"{tmp_path / 'tagger.py'}:build", trust_code=True, data="random", quant="int8", batches=(),
        backend=backend, inputs=("ids=int64[batch,12]",), allow_slower=True, device="cpu",
    )  # fmt: skip
    made = stages.optimize(plan, tmp_path / "tagger.infer")
    assert "97 % of the weights are int8" in made.manifest.verdict
    formats = {row.name: row.format for row in made.manifest.layers}
    assert formats["rnn.weight_hh_l0_reverse"] == "int8"
    error = next(f.value for f in made.manifest.findings if f.what == "output.relative_error")
    assert 0 < error < 0.05
    with Predictor.load(made.path, trust_code=True) as predictor:
        ids = torch.randint(0, 100, (3, 12), generator=torch.Generator().manual_seed(1))
        assert predictor.predict({"ids": ids.numpy()})["output"].shape == (3, 12, 10)
