"""Checkpoints as training tools leave them: wrappers' prefixes, settings beside weights, several models in one file."""

from __future__ import annotations

import argparse
import datetime
import decimal
import os
import pathlib
import pickle
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infer.errors import SourceError, UnsafeSourceError, UsageError
from infer.load import STRATEGIES, LoadedModel, fill, identify, load, unfilled_copy
from infer.plan import Plan
from infer.weights.pickle_scan import INERT_TYPES, InertObject, inert_types_allowed
from infer.weights.torch_file import load_safely, open_torch

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 6)

    def forward(self, image):
        return self.fc(self.norm(self.conv(image)).relu().mean((2, 3)))

INPUTS = {"image": "float32[batch,1,8,8]"}
def example_inputs(): return {"image": torch.linspace(0, 1, 320).view(5, 1, 8, 8)}
def build(): return Net()

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = Net()
    def forward(self, image):
        return self.module(image)

def outer(): return Outer()
"""
State = dict[str, Tensor]
Wrap = Callable[[State], Any]


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def inside(part: str, state: State) -> State:
    """Put a wrapper's part of a name before the last one: `conv._orig_mod.weight`."""
    return {re.sub(r"\.(\w+)$", rf".{part}.\1", name): value for name, value in state.items()}


def other(state: State) -> State:
    return {name: torch.zeros_like(value) for name, value in state.items()}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "net.py"
    path.write_text(NET)
    return path


@pytest.fixture(scope="module")
def original(net: Path) -> nn.Module:
    space: dict[str, Any] = {"__name__": "net"}
    exec(compile(net.read_text(), str(net), "exec"), space)  # noqa: S102
    torch.manual_seed(3)
    model = space["build"]().eval()
    model.norm.running_mean.uniform_()
    return model


def opened(path: Path, net: Path, factory: str = "build", **options: Any) -> LoadedModel:
    loaded = load(Plan(source=str(path), model=f"{net}:{factory}", **options))
    fill(loaded)
    return loaded


def assert_is(loaded: LoadedModel, original: nn.Module) -> None:
    again = unfilled_copy(loaded)
    fill(again)
    with torch.no_grad():
        for module in (loaded.module, again.module):
            assert torch.equal(module(**loaded.samples), original(**loaded.samples))


def notes(loaded: LoadedModel) -> str:
    return "; ".join(str(finding.value) for finding in loaded.findings if finding.what == "checkpoint")


FITTING: dict[str, tuple[Wrap, str, dict[str, Any]]] = {
    "lightning": (
        lambda sd: {"state_dict": prefixed("net.", sd), "epoch": 3, "hyper_parameters": {"lr": 0.1}},
        "took 'state_dict', left epoch, hyper_parameters; took the prefix 'net.' off 9 names",
        {},
    ),
    "two parts": (lambda sd: prefixed("model.backbone.", sd), "prefix 'model.backbone.' off 9 names", {}),
    "compiled": (lambda sd: prefixed("_orig_mod.", sd), "took _orig_mod. out of the names", {}),
    "compiled in parts": (lambda sd: inside("_orig_mod", sd), "took _orig_mod. out of the names", {}),
    "DDP of compiled": (lambda sd: prefixed("module._orig_mod.", sd), "took module. and _orig_mod. out", {}),
    "FSDP": (
        lambda sd: prefixed("_fsdp_wrapped_module.", inside("_checkpoint_wrapped_module", sd)),
        "took _fsdp_wrapped_module. and _checkpoint_wrapped_module. out of the names",
        {},
    ),
    "averaged": (
        lambda sd: {"n_averaged": torch.tensor(3), **prefixed("module.", sd)},
        "ignored n_averaged; took module. out of the names",
        {},
    ),
    "accuracy as a tensor": (
        lambda sd: {"state_dict": prefixed("module.", sd), "best_acc1": torch.tensor(77.0)},
        "took 'state_dict', left best_acc1",
        {},
    ),
    "no counters": (
        lambda sd: {name: value for name, value in sd.items() if "num_batches" not in name},
        "1 num_batches_tracked are not in it: 0",
        {},
    ),
    "ema by key": (lambda sd: {"model": other(sd), "ema": sd}, "took 'ema', left model", {"key": "ema"}),
    "generator by key": (lambda sd: {"G": sd, "D": other(sd)}, "took 'G', left D", {"key": "G"}),
    "nested key": (
        lambda sd: {"state_dict": {"gen": sd, "disc": other(sd)}},
        "took 'state_dict'; took 'gen', left disc",
        {"key": "state_dict.gen"},
    ),
    "key in a container": (
        lambda sd: {"state_dict": {"gen": sd, "disc": other(sd)}},
        "took 'gen', left disc",
        {"key": "gen"},
    ),
    "key of a prefix": (
        lambda sd: {"state_dict": prefixed("model.", sd) | {"loss.weight": torch.ones(6)}},
        "took the 9 tensors under 'model', left 1; took the prefix 'model.'",
        {"key": "model"},
    ),
    "ignored": (
        lambda sd: prefixed("model.", sd) | {"loss.weight": torch.ones(6), "loss.bias": torch.ones(6)},
        "ignored loss.weight, loss.bias; took the prefix 'model.' off 9 names",
        {"ignore_keys": ("loss.*",)},
    ),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("case", FITTING)
def test_wrapped_checkpoints_load_and_report_the_key_used(
    tmp_path: Path, net: Path, original: nn.Module, case: str, legacy: bool
) -> None:
    wrap, said, options = FITTING[case]
    torch.save(wrap(original.state_dict()), tmp_path / "a.ckpt", _use_new_zipfile_serialization=not legacy)
    loaded = opened(tmp_path / "a.ckpt", net, **options)
    assert_is(loaded, original)
    assert said in notes(loaded).replace("the format of torch before 1.6: read whole into memory; ", "")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_loading_strategy_maps_checkpoint_names(
    tmp_path: Path, net: Path, original: nn.Module, strategy: str
) -> None:
    states = {"D": other(original.state_dict()), "G": prefixed("module.net.", original.state_dict())}
    torch.save(states, tmp_path / "a.pt")
    assert_is(opened(tmp_path / "a.pt", net, key="G", load=strategy), original)


def test_safetensors_have_prefixes_and_keys_too(tmp_path: Path, net: Path, original: nn.Module) -> None:
    state = {name: value.clone() for name, value in original.state_dict().items()}
    save_file(prefixed("G.", state) | prefixed("D.", other(state)), tmp_path / "a.safetensors")
    assert_is(opened(tmp_path / "a.safetensors", net, key="G"), original)
    with pytest.raises(SourceError, match="What is under 'D' or 'G' fits the model: --key D"):
        opened(tmp_path / "a.safetensors", net)


def test_a_model_with_a_part_called_module_keeps_its_names(
    tmp_path: Path, net: Path, original: nn.Module
) -> None:
    for prefix in ("module.", "module.module.", "", "net.module."):
        torch.save(prefixed(prefix, original.state_dict()), tmp_path / "a.pt")
        assert_is(opened(tmp_path / "a.pt", net, "outer"), original)


REFUSED: dict[str, tuple[Wrap, dict[str, Any], type[Exception], str]] = {
    "left over": (
        lambda sd: sd | {"aux.weight": torch.ones(2)},
        {},
        SourceError,
        r"1 unexpected in the checkpoint: aux.weight.*If the model can do without: --ignore-keys 'aux\.\*'",
    ),
    "left over in a part": (
        lambda sd: sd | {"fc.scale": torch.ones(2)},
        {},
        SourceError,
        "unexpected.*--ignore-keys 'fc.scale'",
    ),
    "several models": (
        lambda sd: {"G": sd, "D": sd},
        {},
        SourceError,
        "expected one state dict, got 2: G, D.*--key G",
    ),
    "no such key": (lambda sd: {"G": sd, "D": sd}, {"key": "H"}, SourceError, "got 2: G, D"),
    "no such prefix": (lambda sd: sd, {"key": "H"}, UsageError, "has no 'H'.*begin with conv, norm, fc"),
    "glob of nothing": (
        lambda sd: sd,
        {"ignore_keys": ("loss.*",)},
        UsageError,
        r"no tensor of the checkpoint matches 'loss\.\*'",
    ),
    "ignored but needed": (
        lambda sd: sd,
        {"ignore_keys": ("fc.*",)},
        SourceError,
        "2 missing in the checkpoint: fc.weight, fc.bias",
    ),
    "only some have it": (
        lambda sd: {f"net.{k}" if "conv" in k else k: v for k, v in sd.items()},
        {},
        SourceError,
        "missing in the checkpoint: conv.weight, conv.bias",
    ),
    "two of one name": (
        lambda sd: prefixed("module.", sd) | other(sd),
        {},
        SourceError,
        "9 unexpected in the checkpoint: module.conv.weight",
    ),
    "another shape": (
        lambda sd: prefixed("net.", sd) | {"net.fc.weight": torch.ones(6, 5)},
        {},
        SourceError,
        r"fc.weight \[6, 4\] in the model, \[6, 5\] in the checkpoint",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_names_that_do_not_fit_are_listed_with_the_option(
    tmp_path: Path, net: Path, original: nn.Module, case: str
) -> None:
    wrap, options, kind, sentence = REFUSED[case]
    torch.save(wrap(original.state_dict()), tmp_path / "a.pt")
    with pytest.raises(kind, match=sentence):
        opened(tmp_path / "a.pt", net, **options)


def test_names_are_chosen_in_state_dicts_only(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2), tmp_path / "a.pt")
    for options in ({"key": "G"}, {"ignore_keys": ("a",)}):
        with pytest.raises(UsageError):
            load(Plan(source=str(tmp_path / "a.pt"), trust_code=True, **options))


def test_one_pickled_module_of_a_mapping_is_taken(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(3, 2), "epoch": 1}, tmp_path / "a.pt")
    loaded = load(Plan(source=str(tmp_path / "a.pt"), trust_code=True, data="random"))
    assert "took 'model', left epoch" in notes(loaded)
    torch.save({"model": nn.Linear(3, 2), "ema": nn.Linear(4, 2)}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match="got 2: model, ema.*--key model"):
        load(Plan(source=str(tmp_path / "a.pt"), trust_code=True))
    loaded = load(Plan(source=str(tmp_path / "a.pt"), trust_code=True, key="ema", data="random"))
    assert loaded.module.in_features == 4


SETTINGS: dict[str, Any] = {
    "args": argparse.Namespace(lr=0.1, path=pathlib.Path("a/b"), nested=argparse.Namespace(x=[1, 2])),
    "loss": np.float64(0.5),
    "dtypes": [np.dtype("float32"), np.float32, np.int64(3), np.bool_(True), np.str_("x")],
    "random": np.random.RandomState(0).get_state(),
    "array": np.arange(6.0).reshape(2, 3),
    "history": defaultdict(list, train=[1.0, 2.0]),
    "recent": deque([1, 2], maxlen=3),
    "when": [datetime.datetime(2026, 1, 2, 3), datetime.timedelta(1), decimal.Decimal("1.5")],
    "device": torch.device("cpu"),
    "size": torch.Size([1, 2]),
    "dtype": torch.float16,
    "others": [
        {1, 2},
        frozenset({1}),
        slice(1, 2),
        range(3),
        1 + 2j,
        b"bytes",
        bytearray(b"x"),
        1 << 200,
        list,
    ],
}


@pytest.mark.parametrize("legacy", [False, True])
def test_settings_beside_weights_are_read_as_inert_data(
    tmp_path: Path, net: Path, original: nn.Module, legacy: bool
) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(
        {**SETTINGS, "state_dict": original.state_dict()}, path, _use_new_zipfile_serialization=not legacy
    )
    found = identify(path)
    assert (found.kind, found.code) == ("legacy-state-dict" if legacy else "state-dict", False)
    loaded = opened(path, net)
    assert_is(loaded, original)
    assert legacy or "not run, left as data: argparse.Namespace" in notes(loaded)
    held = load_safely(path)
    assert type(held["args"]) is type(held["loss"]) is type(held["array"]) is InertObject
    assert not held["args"].__dir__().__contains__("lr")
    assert held["history"] == OrderedDict(train=[1.0, 2.0])


@pytest.mark.parametrize("key", SETTINGS)
def test_each_kind_of_setting_is_read_on_its_own(tmp_path: Path, key: str) -> None:
    torch.save({key: SETTINGS[key], "state_dict": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    assert list(open_torch(tmp_path / "a.pt").weights) == ["a"]


class Calls:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.call = (function, given)

    def __reduce__(self) -> Any:
        return self.call


def hostile(marker: Path) -> dict[str, Any]:
    command = f"touch {marker}"
    return {
        "system": Calls(os.system, command),
        "eval": Calls(eval, f"__import__('os').system({command!r})"),
        "attribute of a stand-in": Calls(getattr, argparse.Namespace, "__class__"),
        "in a namespace": argparse.Namespace(run=Calls(os.system, command)),
        "as a factory": Calls(defaultdict, Calls(os.system, command)),
        "as a key": {Calls(os.system, command): 1},
        "numpy load": Calls(np.load, str(marker)),
        "path": Calls(pathlib.Path.touch, pathlib.Path(marker)),
    }


@pytest.mark.parametrize("case", sorted(hostile(Path("x"))))
@pytest.mark.parametrize("legacy", [False, True])
def test_hostile_pickles_are_refused_without_running_them(tmp_path: Path, case: str, legacy: bool) -> None:
    path, marker = tmp_path / "a.pt", tmp_path / "ran"
    held = {"state_dict": {"a": torch.ones(2)}, "args": hostile(marker)[case]}
    torch.save(held, path, _use_new_zipfile_serialization=not legacy)
    assert identify(path).code
    with pytest.raises(UnsafeSourceError):
        load_safely(path)
    with pytest.raises(UnsafeSourceError, match="--trust-code"):
        load(Plan(source=str(path), model="net.py:build"))
    assert not marker.exists()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_newer_pickle_protocols_are_named(tmp_path: Path, protocol: int) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}, "n": b"xy"}, tmp_path / "a.pt", pickle_protocol=protocol)
    with pytest.raises(
        SourceError, match="expected pickle protocol 2, got a newer one.*without pickle_protocol"
    ):
        open_torch(tmp_path / "a.pt")


def test_pickle_stand_ins_are_removed_after_loading() -> None:
    made = InertObject(1, run=os.system)
    made.__setstate__({"lr": 1})
    with pytest.raises(AttributeError):
        made.lr = 1  # type: ignore[attr-defined]
    before = set(torch.serialization.get_safe_globals())
    with inert_types_allowed():
        assert len(torch.serialization.get_safe_globals()) > len(before)
    assert set(torch.serialization.get_safe_globals()) == before
    assert not {"builtins.getattr", "builtins.eval", "os.system", "builtins.type"} & set(INERT_TYPES)


def test_random_pickle_calls_execute_no_code(tmp_path: Path) -> None:
    """Call, build and fill every listed name with every kind of argument, in random order: an object or an error."""
    draw = np.random.default_rng(0)
    names = sorted(INERT_TYPES)
    arguments = [b")", b"N\x85", b"K\x05K\x06\x86", b"]q\x01\x85", b"}q\x02\x85", b"X\x01\0\0\0a\x85"]
    after = [
        b"",
        b"}X\x01\0\0\0aK\x01sb",
        b"N}X\x09\0\0\0__class__K\x01s\x86b",
        b"K\x01K\x02s",
        b"K\x01a",
        b")R",
        b")\x81",
    ]
    for _ in range(400):
        module, _, name = names[draw.integers(len(names))].rpartition(".")
        body = b"c" + f"{module}\n{name}\n".encode() + arguments[draw.integers(len(arguments))]
        body += [b"R", b"\x81"][draw.integers(2)] + after[draw.integers(len(after))]
        with inert_types_allowed():
            try:
                made = torch._weights_only_unpickler.load(__import__("io").BytesIO(b"\x80\x02" + body + b"."))
            except (pickle.UnpicklingError, TypeError, AttributeError):
                continue
        assert type(made) in (InertObject, OrderedDict, list), body
