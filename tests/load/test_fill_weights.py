"""Five ways to give weights: all the same values, ties kept, dtypes cast, and only `offload` streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infer.errors import SourceError, UsageError
from infer.load import STRATEGIES, LoadedModel, fill, load, resolve_strategy, unfilled_copy
from infer.load.weight_loading.meta_model import build_on_meta, match_checkpoint
from infer.load.weight_loading.offload import StreamedLayer
from infer.plan import Plan
from infer.weights import Checkpoint, in_memory
from infer.weights.safetensors_file import open_safetensors
from infer.weights.torch_file import open_torch


class Many(nn.Module):
    """Each layer that is streamed, a tie, a normalisation, a scalar, a table that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.groups = nn.Conv1d(6, 12, 3, padding=1, groups=3)
        self.back, self.norm = nn.Linear(12, 6), nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.groups(self.conv(self.embed(ids).transpose(1, 2))).transpose(1, 2)
        x = self.norm(self.back(x).transpose(1, 2)).transpose(1, 2) + self.table[:, None]
        return self.head(x) * self.scale


IDS = torch.tensor([[1, 2, 3, 4, 10], [0, 0, 10, 5, 6]])


def as_torch(state: dict[str, Tensor], folder: Path) -> Checkpoint:
    torch.save(state, folder / "m.pt")
    return open_torch(folder / "m.pt").weights


def as_safetensors(state: dict[str, Tensor], folder: Path) -> Checkpoint:
    save_file(
        {name: value.clone() for name, value in state.items() if name != "head.weight"}, folder / "m.st"
    )
    return open_safetensors(folder / "m.st").weights


def loaded_from(checkpoint: Checkpoint) -> LoadedModel:
    module, _ = build_on_meta(Many, "Many")
    fit = match_checkpoint(module, checkpoint)
    fit.check("here", strict=False)
    return LoadedModel("state-dict", module, checkpoint, (), {}, "", renames=fit.renames)


@pytest.fixture
def original() -> nn.Module:
    model = Many()
    model.norm.running_mean.uniform_()
    return model.eval()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("make", [as_torch, as_safetensors])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_weight_loading_strategy_gives_equal_outputs(
    tmp_path: Path, original: nn.Module, strategy: str, make: Callable, stored: torch.dtype
) -> None:
    state = {k: v.to(stored) if v.is_floating_point() else v for k, v in original.state_dict().items()}
    expected = Many().eval()
    expected.load_state_dict(state)
    loaded = loaded_from(make(state, tmp_path))
    findings = fill(loaded, strategy=strategy)
    assert findings[0].what == f"fill {strategy}"
    with torch.no_grad():
        got, want = loaded.module(IDS), expected(IDS)
    assert got.dtype == torch.float32
    if strategy == "offload":
        torch.testing.assert_close(got, want)
        assert sum(isinstance(layer, StreamedLayer) for layer in loaded.module.modules()) == 5
    else:
        assert torch.equal(got, want)
        assert loaded.module.head.weight is loaded.module.embed.weight
    assert not any(t.is_meta for t in (*loaded.module.parameters(), *loaded.module.buffers()))


def test_mapped_weights_are_the_file_and_writing_them_is_private(tmp_path: Path, original: nn.Module) -> None:
    checkpoint = as_safetensors(original.state_dict(), tmp_path)
    before = (tmp_path / "m.st").read_bytes()
    loaded = loaded_from(checkpoint)
    assert "copied" not in fill(loaded, strategy="meta")[0].why
    with torch.no_grad():
        loaded.module.embed.weight.zero_()
    assert (tmp_path / "m.st").read_bytes() == before


def test_filling_weights_twice_is_idempotent(tmp_path: Path, original: nn.Module) -> None:
    loaded = loaded_from(as_torch(original.state_dict(), tmp_path))
    fill(loaded)
    weight = loaded.module.conv.weight
    fill(loaded)
    assert loaded.module.conv.weight is weight


def test_missing_names_and_other_shapes_are_refused(original: nn.Module) -> None:
    module, _ = build_on_meta(Many, "Many")
    state = dict(original.state_dict())
    del state["conv.bias"]
    loaded = LoadedModel("state-dict", module, in_memory(state), (), {}, "")
    with pytest.raises(SourceError, match="holds no 'conv.bias'"):
        fill(loaded)
    loaded = replace(loaded, checkpoint=in_memory(state | {"conv.bias": torch.zeros(4)}))
    with pytest.raises(SourceError, match=r"expected 'conv.bias' of shape \[6\], got \[4\]"):
        fill(loaded)


def test_an_unknown_loading_strategy_suggests_the_known_ones(original: nn.Module) -> None:
    loaded = loaded_from(in_memory(original.state_dict()))
    with pytest.raises(UsageError, match="no way to load named 'ofload'.*Did you mean offload"):
        fill(loaded, strategy="ofload")
    with pytest.raises(UsageError, match="no way to load named 'x'"):
        resolve_strategy(Plan(source="a", load="x"), loaded)


def test_auto_streams_only_what_does_not_fit(original: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    import infer.load.weight_loading.fill_weights as filling

    loaded = loaded_from(in_memory(original.state_dict()))
    assert resolve_strategy(Plan(source="a"), loaded).value == "meta"
    assert resolve_strategy(Plan(source="a", load="offload"), loaded).reason == "asked for"
    little = types.SimpleNamespace(virtual_memory=lambda: types.SimpleNamespace(available=1000))
    monkeypatch.setattr(filling, "psutil", little)
    choice = resolve_strategy(Plan(source="a"), loaded)
    assert choice.value == "offload"
    assert "more than 60%" in choice.reason


@pytest.mark.parametrize("block", [1, 40, 10**9])
def test_streamed_layers_agree_at_any_block_size(
    original: nn.Module, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    import infer.load.weight_loading.offload as offload

    monkeypatch.setattr(offload, "BLOCK_BYTES", block)
    loaded = loaded_from(in_memory(original.state_dict()))
    fill(loaded, strategy="offload")
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(IDS), original(IDS))


def test_a_streamed_model_follows_its_dtype(original: nn.Module) -> None:
    loaded = loaded_from(in_memory(original.state_dict()))
    fill(loaded, strategy="offload")
    with torch.no_grad():
        got = loaded.module.to(torch.bfloat16)(IDS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), original(IDS), rtol=0.1, atol=0.1)


def test_a_streamed_model_can_be_captured(original: nn.Module) -> None:
    loaded = loaded_from(in_memory(original.state_dict()))
    fill(loaded, strategy="offload")
    batch = torch.export.Dim("batch", min=1, max=8)
    with torch.no_grad():
        program = torch.export.export(loaded.module, (), {"ids": IDS}, dynamic_shapes={"ids": {0: batch}})
        torch.testing.assert_close(program.module()(ids=IDS[:1]), original(IDS[:1]))


def test_streamed_convolutions_in_two_dimensions_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    import infer.load.weight_loading.offload as offload

    monkeypatch.setattr(offload, "BLOCK_BYTES", 64)
    for groups, stride, padding in ((1, 1, 0), (2, 2, 1), (4, 1, 2)):
        plain = nn.Conv2d(4, 8, 3, stride=stride, padding=padding, groups=groups)
        holder, _ = build_on_meta(
            lambda p=plain: nn.Sequential(nn.Conv2d(4, 8, 3, p.stride, p.padding, 1, p.groups)), "c"
        )
        state = {f"0.{name}": value for name, value in plain.state_dict().items()}
        fill(LoadedModel("state-dict", holder, in_memory(state), (), {}, ""), strategy="offload")
        x = torch.randn(2, 4, 7, 9)
        with torch.no_grad():
            torch.testing.assert_close(holder(x), plain(x))


def test_a_row_larger_than_the_block_is_checked_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infer.load.weight_loading import fill_weights as mapped

    monkeypatch.setattr(mapped, "BLOCK_BYTES", 8)
    weight = torch.randn(3, 40)
    weight[2, 39] = float("inf")
    save_file({"0.weight": weight, "0.bias": torch.zeros(3)}, tmp_path / "m.st")
    holder, _ = build_on_meta(lambda: nn.Sequential(nn.Linear(40, 3)), "linear")
    loaded = LoadedModel("safetensors", holder, open_safetensors(tmp_path / "m.st").weights, (), {}, "")
    with pytest.raises(
        SourceError, match=r"1 NaN or infinite values in rows 0 to 3 of '0.weight' - at .*m\.st"
    ):
        fill(loaded, strategy="meta")


KEEPS_LAYERS = """
from torch import nn

INPUTS = {"x": "float32[batch,6]"}
KEPT = nn.Linear(6, 6)
WHOLE = nn.Sequential(KEPT, nn.ReLU())

def part():
    return nn.Sequential(KEPT, nn.ReLU(), nn.Linear(6, 2))

def whole():
    return WHOLE
"""


@pytest.mark.parametrize("factory", ["part", "whole"])
def test_a_copy_of_a_model_whose_factory_keeps_layers_leaves_it_filled(tmp_path: Path, factory: str) -> None:
    (tmp_path / "net.py").write_text(KEEPS_LAYERS)
    space: dict[str, Any] = {}
    exec(KEEPS_LAYERS, space)  # noqa: S102
    original = space[factory]()
    torch.save(original.state_dict(), tmp_path / "net.pt")
    plan = Plan(source=str(tmp_path / "net.pt"), model=f"{tmp_path}/net.py:{factory}", data="random")
    loaded = load(plan)
    fill(loaded)
    x = torch.randn(3, 6)
    with torch.no_grad():
        for _ in range(2):
            copied = unfilled_copy(loaded)
            assert all(value.is_meta for value in copied.module.state_dict().values())
            torch.testing.assert_close(loaded.module(x), original(x))
        fill(copied)
        torch.testing.assert_close(copied.module(x), original(x))
