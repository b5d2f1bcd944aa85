"""Effects of single layers: the same as running the changed model whole, whatever was replayed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from infer import compress
from infer.compress import Candidates, PackingCache
from infer.compress.assign import sensitivity
from infer.compress.assign.partial_forward import Replay
from infer.fidelity import OutputDivergence, compare
from infer.plan import Plan
from infer.spec import TensorSpec

PLAN = Plan(source="x", quant="nf4")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Tied embedding and head around blocks; `unused` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(100, 64), nn.ModuleList(Block() for _ in range(3))
        self.head, self.unused = nn.Linear(64, 100, bias=False), nn.Linear(64, 64)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


IDS = (TensorSpec("ids", "int64", ("batch", "seq")),)


def candidates(model: nn.Module, formats: list[str]) -> Candidates:
    return Candidates(model, PLAN, formats, {}, PackingCache())


def measured(
    model: nn.Module, formats: list[str], samples: dict[str, Tensor], **more
) -> sensitivity.Sensitivity:
    found = candidates(model, formats)
    wanted = {w.name: found.accepted(w) for w in found.weights}
    return sensitivity.measure(
        model, found, wanted, samples, inputs=IDS, names=("logits",), task="text-generation", **more
    )


@pytest.fixture
def model() -> nn.Module:
    return Decoder().eval()


@pytest.fixture
def ids() -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 100, (4, 9))}


def test_a_layers_effect_is_the_error_with_only_it_packed(model: nn.Module, ids: dict[str, Tensor]) -> None:
    found = measured(model, ["int8", "cluster:2"], ids)
    blocks = {f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")}
    assert {layer.name for layer in found.layers} == {"embed", "unused", *blocks}
    assert found.unit == "nats"
    with torch.no_grad():
        want = model(**ids)
        for layer in (each for each in found.layers if each.name != "unused"):
            for format in ("int8", "cluster:2"):
                small = copy.deepcopy(model)
                others = {n: "float" for n in compress.layer_names(small) if n not in layer.names}
                compress.quantize_model(small, PLAN.with_(quant=format), formats=others)
                slow = compare(want, small(**ids), task="text-generation")
                kl = next(f.value for f in slow if f.label == "logits.kl")
                assert layer.effect[format] == pytest.approx(kl, rel=1e-3, abs=1e-8)


def test_a_layer_that_no_input_reaches_has_no_effect(model: nn.Module, ids: dict[str, Tensor]) -> None:
    (unused,) = (layer for layer in measured(model, ["cluster:2"], ids).layers if layer.name == "unused")
    assert unused.effect == {"float": 0.0, "cluster:2": 0.0}
    assert 0 < unused.bits("cluster:2") < 4


def test_tied_layers_are_one_weight_under_both_names(model: nn.Module, ids: dict[str, Tensor]) -> None:
    tied = measured(model, ["nf4"], ids).layers[0]
    assert set(tied.names) == {"embed", "head"}
    assert tied.num_weights == 6400


def test_measuring_sensitivity_leaves_the_model_unchanged(model: nn.Module, ids: dict[str, Tensor]) -> None:
    before, want = str(model), model(**ids)["logits"]
    measured(model, ["int8", "nf4"], ids)
    assert str(model) == before
    assert torch.equal(model(**ids)["logits"], want)
    assert all("forward" not in vars(module) for module in model.modules())


def test_out_of_time_other_formats_are_estimated_from_weight_errors(
    model: nn.Module, ids: dict[str, Tensor]
) -> None:
    now = iter(range(10_000))
    found = measured(model, ["cluster:2", "int8"], ids, seconds=1e-3, clock=lambda: float(next(now)))
    assert found.rows == 1
    assert (found.num_measured, found.num_estimated) == (8, 8)
    assert "8 more estimated" in found.summary()
    for layer in found.layers:
        assert layer.estimated == {"int8"}
        share = (layer.weight_error["int8"] / layer.weight_error["cluster:2"]) ** 2
        assert layer.effect["int8"] == pytest.approx(layer.effect["cluster:2"] * share)


class Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return super().forward(x)


def test_blocks_before_the_changed_layer_are_not_run_again() -> None:
    model = nn.Sequential(*(Counting() for _ in range(4))).eval()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    replay = Replay(_Named(model), layers, {"x": torch.randn(2, 64)})
    Counting.calls = 0
    assert torch.equal(replay.run([model[2].up])[0], replay.outputs[0])
    assert Counting.calls == 2
    replay.run([model[0].down])
    assert Counting.calls == 2 + 4


class _Named(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Remembering(nn.Module):
    """Every block adds what the one before left behind: outputs alone do not say all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Side(self) for _ in range(3))
        self.left = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.left = torch.zeros(())
        for block in self.blocks:
            x = block(x)
        return x


class _Side(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.linear, self._owner = nn.Linear(64, 64), [owner]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self._owner[0].left
        self._owner[0].left = y.mean()
        return y


def test_blocks_with_side_effects_are_always_run() -> None:
    model = Remembering().eval()
    x = torch.randn(3, 64)
    layers = [block.linear for block in model.blocks]
    replay = Replay(model, layers, {"x": x})
    assert torch.equal(replay.run([layers[2]])[0], model(x))


def test_padded_tokens_and_masked_classes_do_not_count() -> None:
    logits = torch.randn(2, 5, 7)
    logits[..., 3] = -torch.inf
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    effect = OutputDivergence(("logits",), [logits], {"attention_mask": mask}, "text-generation")
    changed = logits.clone()
    changed[0, 3:] = torch.randn(2, 7)
    assert effect.of([changed]) == pytest.approx(0.0, abs=1e-9)
    changed[0, 0] = torch.randn(7)
    assert 0 < effect.of([changed]) < torch.inf
    changed[0, 0, 0] = -torch.inf
    assert effect.of([changed]) == torch.inf  # what was possible is not any more


def test_outputs_that_are_not_finite_have_infinite_effect() -> None:
    for task in ("text-generation", "tensors"):
        effect = OutputDivergence(("y",), [torch.ones(2, 3)], {}, task)
        assert effect.of([torch.ones(2, 3)]) == 0.0
        assert effect.of([torch.full((2, 3), torch.nan)]) == torch.inf


def test_outputs_that_are_no_logits_count_by_their_squared_relative_error() -> None:
    effect = OutputDivergence(("y",), [torch.full((2, 3), 2.0)], {}, "embedding")
    assert effect.unit == "squared relative error"
    assert effect.of([torch.full((2, 3), 2.2)]) == pytest.approx(0.01)
