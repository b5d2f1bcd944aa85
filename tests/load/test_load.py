"""load(): every kind of source becomes a model with inputs and samples, or a sentence."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infer.errors import NotUsableError, SourceError, UnsafeSourceError, UsageError
from infer.load import LoadedModel, fill, load
from infer.load.input_specs import propose_input
from infer.plan import Plan

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.fc = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.randn(6))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, image):
        x = self.norm(self.conv(image)).relu().mean((2, 3))
        return self.head(self.fc(x) * self.scale + self.table)

INPUTS = {"image": "float32[batch,1,8,8]"}
OUTPUTS = ("logits",)
TASK = "classification"

def example_inputs():
    return {"image": torch.linspace(0, 1, 320).view(5, 1, 8, 8)}

def calibration_inputs():
    return {"image": torch.ones(3, 1, 8, 8)}

def build():
    torch.manual_seed(7)
    net = Net()
    net.norm.running_mean.uniform_()
    return net

def stubborn():
    net = Net()
    net.start = net.fc.weight.sum().item()
    return net

def made_by_empty():
    net = Net()
    net.register_buffer("mask", torch.empty(6).fill_(2.0), persistent=False)
    return net

def smaller():
    net = Net()
    net.fc = nn.Linear(4, 5)
    del net.norm
    return net

def none(): return None

def broken(): raise KeyError("weights.bin")

def misspelled(): return Nett()

def unreadable(): return open("no-such-config.json")
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


@pytest.fixture
def original(net: Path) -> nn.Module:
    space: dict[str, object] = {"__name__": "net"}
    exec(compile(net.read_text(), str(net), "exec"), space)  # noqa: S102
    return space["build"]().eval()


@pytest.fixture
def checkpoint(tmp_path: Path, original: nn.Module) -> Path:
    torch.save(original.state_dict(), tmp_path / "net.pt")
    return tmp_path / "net.pt"


def run(loaded: LoadedModel) -> Tensor:
    with torch.no_grad():
        return loaded.module(**loaded.samples)


def finding_text(loaded: LoadedModel, what: str) -> str:
    return next(f"{f.value} {f.why}" for f in loaded.findings if f.what == what)


def test_a_state_dict_and_a_recipe_give_the_original(
    net: Path, checkpoint: Path, original: nn.Module
) -> None:
    loaded = load(Plan(source=str(checkpoint), model=f"{net}:build"))
    assert loaded.kind == "state-dict"
    assert all(p.is_meta for p in loaded.module.parameters())
    assert (loaded.task, loaded.outputs) == ("classification", ("logits",))
    assert [spec.format() for spec in loaded.inputs] == ["image=float32[batch,1,8,8]"]
    assert loaded.sizes == {"batch": (1, 64)}
    assert loaded.samples_from == f"{net}:example_inputs"
    assert loaded.calibration["image"].shape == (3, 1, 8, 8)
    fill(loaded)
    assert loaded.module.head.weight is loaded.module.embed.weight
    assert torch.equal(run(loaded), original(**loaded.samples))


@pytest.mark.parametrize("kind", ["recipe", "folder"])
def test_a_source_that_builds_its_model_takes_no_other(kind: str, tmp_path: Path, net: Path) -> None:
    source = f"{net}:build"
    if kind == "folder":
        source = str(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"is a model already - at --model\. Leave --model out"):
        load(Plan(source=source, model=f"{net}:build"))


def test_safetensors_and_the_old_format_open_the_same_way(
    tmp_path: Path, net: Path, original: nn.Module
) -> None:
    state = {name: value.clone() for name, value in original.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, kind in (("a.safetensors", "safetensors"), ("old.pt", "state-dict")):
        loaded = load(Plan(source=str(tmp_path / name), model=f"{net}:build"))
        fill(loaded)
        assert loaded.kind == kind
        assert torch.equal(run(loaded), original(**loaded.samples))


def test_an_expanded_tensor_in_the_old_format_is_refused(tmp_path: Path, net: Path) -> None:
    bomb = {"bomb": torch.zeros(1).expand(1 << 40)}
    torch.save(bomb, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SourceError, match="needs 4398046511104 bytes, its storage has 4"):
        load(Plan(source=str(tmp_path / "old.pt"), model=f"{net}:build"))


def test_a_state_dict_without_a_model_asks_for_the_model_option(checkpoint: Path) -> None:
    with pytest.raises(
        UsageError, match=r"holds 12 tensors, first scale \[6\].*--model net\.py:build"
    ) as caught:
        load(Plan(source=str(checkpoint)))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("factory", "error", "text"),
    [
        (
            "smaller",
            SourceError,
            r"5 unexpected in the checkpoint: norm.weight.*fc.weight \[5, 4\] in the model, \[6, 4\]",
        ),
        ("none", SourceError, "return an nn.Module, got NoneType"),
        ("broken", SourceError, "raised KeyError: 'weights.bin'"),
        ("misspelled", SourceError, r"raised NameError: name 'Nett' is not defined.* - at .*net\.py"),
        ("unreadable", SourceError, "raised FileNotFoundError: .*no-such-config"),
        ("biuld", UsageError, r"no factory in .*'biuld'\. Known: .*Did you mean build\?"),
    ],
)
def test_a_model_factory_of_the_wrong_form_is_refused(
    net: Path, checkpoint: Path, factory: str, error: type, text: str
) -> None:
    with pytest.raises(error, match=text):
        load(Plan(source=str(checkpoint), model=f"{net}:{factory}"))


def test_the_hint_names_a_foreign_prefix(tmp_path: Path, net: Path, original: nn.Module) -> None:
    state = {f"net.{name}": value for name, value in original.state_dict().items()}
    torch.save(state | {"loss.weight": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=r"12 missing.* and 2 more.*under 'net' fits the model: --key net"):
        load(Plan(source=str(tmp_path / "a.pt"), model=f"{net}:build"))


@pytest.mark.parametrize("factory", ["stubborn", "made_by_empty"])
def test_a_factory_that_needs_values_is_built_on_cpu(net: Path, checkpoint: Path, factory: str) -> None:
    loaded = load(Plan(source=str(checkpoint), model=f"{net}:{factory}"))
    assert finding_text(loaded, "skeleton").startswith("cpu ")
    fill(loaded)
    assert not any(t.is_meta for t in (*loaded.module.parameters(), *loaded.module.buffers()))
    if factory == "made_by_empty":
        assert torch.equal(loaded.module.mask, torch.full((6,), 2.0))


def test_nan_weights_stop_the_load(tmp_path: Path, net: Path, original: nn.Module) -> None:
    original.fc.weight.data[2, 1] = float("nan")
    torch.save(original.state_dict(), tmp_path / "a.pt")
    loaded = load(Plan(source=str(tmp_path / "a.pt"), model=f"{net}:build"))
    with pytest.raises(
        SourceError, match=r"1 NaN or infinite values in rows 0 to 6 of 'fc.weight' - at .*a\.pt"
    ):
        fill(loaded)


def test_a_user_module_provides_its_own_weights(net: Path, original: nn.Module) -> None:
    loaded = load(Plan(source=f"{net}:build"))
    assert loaded.kind == "module"
    assert loaded.checkpoint is None
    assert fill(loaded) == []
    assert torch.equal(run(loaded), original(**loaded.samples))


def test_a_pickled_module_opens_only_with_trust_and_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    torch.save(model, tmp_path / "m.pt")
    loaded = load(Plan(source=str(tmp_path / "m.pt"), trust_code=True, data="random"))
    assert "torch.nn.modules.container.Sequential" in finding_text(loaded, "trusted code")
    assert finding_text(loaded, "input proposed").startswith(
        "input=float32[batch,3] from its first layer 0 (Linear)"
    )
    assert torch.equal(run(loaded), model(**loaded.samples))


def test_a_pickled_module_without_its_code_is_refused(tmp_path: Path) -> None:
    import sys
    import types

    module = types.ModuleType("gone_for_good")
    module.Net = type("Net", (nn.Linear,), {"__module__": "gone_for_good"})
    sys.modules["gone_for_good"] = module
    torch.save(module.Net(2, 2), tmp_path / "m.pt")
    del sys.modules["gone_for_good"]
    with pytest.raises(SourceError, match="names code that is not here.*gone_for_good"):
        load(Plan(source=str(tmp_path / "m.pt"), trust_code=True, data="random"))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x)).relu()


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 3))])
def test_torchscript_is_read_and_converted(tmp_path: Path, make: Callable[[nn.Module], object]) -> None:
    model = Branching().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(model).save(str(tmp_path / "m.pt"))
    plan = Plan(source=str(tmp_path / "m.pt"), trust_code=True, data="random", inputs=("x=float32[batch,3]",))
    loaded = load(plan)
    assert loaded.kind == "torchscript"
    torch.testing.assert_close(run(loaded), model(**loaded.samples))
    with pytest.raises(UsageError, match="its forward takes x - at --input"):
        load(plan.with_(inputs=()))
    with pytest.raises(UsageError, match="forward takes x, got y"):
        load(plan.with_(inputs=("y=float32[batch,3]",)))


class GreyOfColour(nn.Module):
    """Takes images of any number of channels, and convolves their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.InstanceNorm2d(1), nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(x.mean(1, keepdim=True)))


class TwoIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x) + y


def test_inputs_of_torchscript_are_inferred_from_the_data(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Branching().eval()).save(str(tmp_path / "one.pt"))
        torch.jit.script(TwoIn().eval()).save(str(tmp_path / "two.pt"))
    x, y = np.ones((5, 3)), np.ones((5, 4), np.float32)  # NumPy's own default is float64
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "both.npz", x=x, y=y)
    torch.save({"x": torch.tensor(x), "y": torch.tensor(y)}, tmp_path / "both.pt")
    for source, data, expected in (
        ("one.pt", "x.npy", ["x=float32[batch,3]"]),
        ("two.pt", "both.npz", ["x=float32[batch,3]", "y=float32[batch,4]"]),
        ("two.pt", "both.pt", ["x=float32[batch,3]", "y=float32[batch,4]"]),
    ):
        plan = Plan(source=str(tmp_path / source), trust_code=True, data=str(tmp_path / data))
        loaded = load(plan)
        assert [spec.format() for spec in loaded.inputs] == expected
        assert "from the array in" in finding_text(loaded, "input proposed")
    with pytest.raises(UsageError, match="its forward takes x, y.*Give --data with an array of each input"):
        load(Plan(source=str(tmp_path / "two.pt"), trust_code=True, data=str(tmp_path / "x.npy")))


def test_inputs_and_sizes_come_from_the_exported_program(tmp_path: Path) -> None:
    model, batch = TwoIn().eval(), torch.export.Dim("rows", min=1, max=9)
    program = torch.export.export(
        model, (torch.ones(2, 3),), {"y": torch.ones(2, 4)}, dynamic_shapes={"x": {0: batch}, "y": {0: batch}}
    )
    torch.export.save(program, tmp_path / "m.pt2")
    loaded = load(Plan(source=str(tmp_path / "m.pt2"), trust_code=True, data="random"))
    assert [spec.format() for spec in loaded.inputs] == ["x=float32[batch,3]", "y=float32[batch,4]"]
    assert loaded.sizes == {"batch": (1, 9)}
    assert torch.equal(run(loaded), model(**loaded.samples))
    again = torch.export.export(loaded.module, (), dict(loaded.samples), strict=False)
    assert torch.equal(again.module()(**loaded.samples), model(**loaded.samples))


def test_input_on_the_command_line_wins(net: Path, checkpoint: Path) -> None:
    plan = Plan(source=str(checkpoint), model=f"{net}:build", inputs=("image=float32[n,1,height,8]",))
    loaded = load(plan)
    assert loaded.inputs[0].shape == ("n", 1, "height", 8)
    assert loaded.sizes == {"n": (1, 64)}


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (nn.Sequential(nn.Linear(7, 2)), "input=float32[batch,7]"),
        (nn.Sequential(nn.Conv2d(3, 2, 3)), "input=float32[batch,3,height,width]"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), "input=float32[batch,1,height,width]"),
        (GreyOfColour(), "x=float32[batch,3,height,width]"),
        (nn.Sequential(nn.Conv1d(3, 2, 3)), "input=float32[batch,3,length]"),
        (nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2)), "input=int64[batch,seq]"),
        (nn.Sequential(nn.LSTM(3, 2)), None),
        (TwoIn(), None),
    ],
)
def test_inputs_are_proposed_from_the_first_layer_or_not_at_all(layer: nn.Module, spec: str | None) -> None:
    found, why = propose_input(layer)
    assert (found.format() if found else None) == spec
    assert why


TWO = """
import torch
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
    def forward(self, x, y):
        return self.fc(x) + y
"""


def test_inputs_that_can_not_be_known_are_asked_for(tmp_path: Path) -> None:
    torch.save(TwoIn().state_dict(), tmp_path / "m.pt")
    (tmp_path / "two.py").write_text(TWO)
    with pytest.raises(UsageError, match=r"its forward takes x, y - at --input\. Example: --input x="):
        load(Plan(source=str(tmp_path / "m.pt"), model=f"{tmp_path}/two.py:Two", data="random"))


ROWS_OF_FRAMES = """
import torch
class Beats(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = torch.nn.Conv1d(1, 2, 3), torch.nn.Linear(12, 4)
    def forward(self, frames, mask=None, scale=2.0):
        y = self.fc(self.conv(frames.reshape(-1, 1, 8)).flatten(1)).unflatten(0, frames.shape[:2]) * scale
        return y if mask is None else y * mask.unsqueeze(-1)
"""


@pytest.mark.parametrize(
    ("arrays", "inputs"),
    [
        ({"frames": (4, 5, 8)}, ["frames=float32[batch,5,8]"]),  # its first layer says [batch, 1, length]
        (
            {"frames": (4, 5, 8), "mask": (4, 5), "labels": (4,)},
            ["frames=float32[batch,5,8]", "mask=float32[batch,5]"],
        ),
        ({"frames": (4, 1, 8)}, ["frames=float32[batch,1,length]"]),  # a guess that fits keeps its open sizes
    ],
)
def test_arrays_of_the_user_beat_a_guess_of_the_inputs(
    arrays: dict[str, tuple[int, ...]], inputs: list[str], tmp_path: Path
) -> None:
    (tmp_path / "beats.py").write_text(ROWS_OF_FRAMES)
    drawn = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", **{name: drawn.random(shape) for name, shape in arrays.items()})
    loaded = load(Plan(source=f"{tmp_path}/beats.py:Beats", data=str(tmp_path / "rows.npz")))
    assert [spec.format() for spec in loaded.inputs] == inputs
    assert [tuple(loaded.samples[name].shape) for name in loaded.samples] == [
        arrays[spec.name] for spec in loaded.inputs
    ]


def test_arrays_tell_the_inputs_of_a_model_of_two_arguments(tmp_path: Path) -> None:
    torch.save(TwoIn().state_dict(), tmp_path / "m.pt")
    (tmp_path / "two.py").write_text(TWO)
    np.savez(tmp_path / "rows.npz", x=np.ones((2, 3)), y=np.ones((2, 4), np.float32))
    loaded = load(
        Plan(source=str(tmp_path / "m.pt"), model=f"{tmp_path}/two.py:Two", data=str(tmp_path / "rows.npz"))
    )
    assert [spec.format() for spec in loaded.inputs] == ["x=float32[batch,3]", "y=float32[batch,4]"]
    assert "rows.npz" in finding_text(loaded, "input proposed")


def save_onnx(path: Path, location: str = "", size: int = 24) -> None:
    from onnx import TensorProto, helper, save

    value = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", d]) for n, d in (("x", 3), ("y", 2))
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 2], b"\0" * 24, raw=True)
    if location:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, text in {"location": location, "offset": "0", "length": str(size)}.items():
            weight.external_data.add(key=key, value=text)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", value[:1], value[1:], [weight]
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def test_the_rows_of_onnx_inputs_and_outputs_are_the_batch(tmp_path: Path) -> None:
    save_onnx(tmp_path / "m.onnx")
    loaded = load(Plan(source=str(tmp_path / "m.onnx"), data="random"))
    assert (loaded.kind, loaded.module, loaded.file) == ("onnx", None, tmp_path / "m.onnx")
    assert loaded.inputs[0].format() == "x=float32[batch,3]"
    assert loaded.meta["outputs"][0].format() == "y=float32[batch,2]"
    assert loaded.sizes == {"batch": (1, 64)}


def test_onnx_external_data_beside_the_model_is_fine(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 24)
    save_onnx(tmp_path / "m.onnx", "w.bin")
    assert "1 in external files" in finding_text(
        load(Plan(source=str(tmp_path / "m.onnx"), data="random")), "opset"
    )


@pytest.mark.parametrize(
    ("location", "error", "text"),
    [
        ("../w.bin", UnsafeSourceError, "points outside"),
        ("/etc/passwd", UnsafeSourceError, "points outside"),
        ("link.bin", UnsafeSourceError, "not a plain file"),
        ("hard.bin", UnsafeSourceError, "hard link"),
        ("linked/w.bin", UnsafeSourceError, "not a plain file"),
        ("gone.bin", SourceError, "is missing"),
        ("short.bin", SourceError, "needs bytes 0 to 24"),
    ],
)
def test_onnx_external_data_that_escapes_is_refused(
    tmp_path: Path, location: str, error: type, text: str
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(b"\0" * 24)
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    os.link(tmp_path / "w.bin", folder / "hard.bin")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "short.bin").write_bytes(b"\0" * 8)
    save_onnx(folder / "m.onnx", location)
    with pytest.raises(error, match=text) as caught:
        load(Plan(source=str(folder / "m.onnx"), data="random"))
    assert caught.value.exit_code == 3


def test_torch_without_a_converter_is_not_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._export.converter as converter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Linear(3, 2)).save(str(tmp_path / "m.pt"))
    monkeypatch.delattr(converter, "TS2EPConverter")
    plan = Plan(
        source=str(tmp_path / "m.pt"), trust_code=True, data="random", inputs=("input=float32[batch,3]",)
    )
    with pytest.raises(NotUsableError, match="no TorchScript converter") as caught:
        load(plan)
    assert caught.value.exit_code == 5


def test_an_input_that_the_graph_lacks_is_a_usage_error(tmp_path: Path) -> None:
    save_onnx(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="the graph has no input 'z' - at --input. Known: x"):
        load(Plan(source=str(tmp_path / "m.onnx"), data="random", inputs=("z=float32[n,3]",)))
    with pytest.raises(UsageError, match="input 'x' is given twice - at --input"):
        load(
            Plan(source=str(tmp_path / "m.onnx"), data="random", inputs=("x=float32[n,3]", "x=float32[4,3]"))
        )
    loaded = load(Plan(source=str(tmp_path / "m.onnx"), data="random", inputs=("x=float32[4,3]",)))
    assert loaded.inputs[0].shape == (4, 3)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "import nothing_of_this_name\n",
            "raised ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("def build(:\n", "raised SyntaxError"),
        ("def build(size): ...\n", "raised TypeError: build() missing 1 required"),
    ],
)
def test_errors_of_the_users_file_name_the_file(tmp_path: Path, code: str, text: str) -> None:
    import re

    (tmp_path / "net.py").write_text(code)
    with pytest.raises(SourceError, match=f"net\\.py.* {re.escape(text)}") as caught:
        load(Plan(source=f"{tmp_path}/net.py:build", data="random"))
    assert caught.value.exit_code == 3
    assert caught.value.__cause__ is not None


def test_a_user_module_may_import_files_beside_it(tmp_path: Path, net: Path) -> None:
    (tmp_path / "outer_net.py").write_text("from net import build, example_inputs, INPUTS\n")
    loaded = load(Plan(source=f"{tmp_path}/outer_net.py:build"))
    assert loaded.samples["image"].shape == (5, 1, 8, 8)


def test_an_exported_program_that_takes_complex_numbers_is_refused(tmp_path: Path) -> None:
    class Real(nn.Module):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(z)

    torch.export.save(torch.export.export(Real(), (torch.randn(2, 3) + 0j,)), tmp_path / "m.pt2")
    with pytest.raises(NotUsableError, match="input 'z' of the program is of dtype complex64"):
        load(Plan(source=str(tmp_path / "m.pt2"), trust_code=True, data="random"))
