"""Advice of refusals, done as it stands: it has to work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from infer.cli import main
from infer.load.sources import user_module

NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = {layer}
    def forward(self, {takes}):
        return {returns}
def build():
    torch.manual_seed(0)
    return Net()
"""


def ran(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    given = [*arguments, "--data", "random", "--batch", "1", "--allow-slower", "--force"]
    code = main(["optimize", *given, "--output", str(folder / "m.infer")])
    return code, capsys.readouterr().err.splitlines()[-1]


def advised(said: str, option: str) -> list[str]:
    """Return the options that a message advises, as a shell reads them."""
    found = re.findall(rf"--{option} (?:'[^']*'|\w+=\w+\[[^\]]*\]|[\w:]+)", said)
    return [word for text in found for word in shlex.split(text)]


def net(folder: Path, layer: str, takes: str, returns: str, inputs: str = "") -> list[str]:
    (folder / "net.py").write_text(NET.format(layer=layer, takes=takes, returns=returns) + inputs)
    made = user_module.import_file(folder / "net.py").build()
    torch.save(made.state_dict(), folder / "net.pt")
    return [str(folder / "net.pt"), "--model", f"{folder}/net.py:build", "--backend", "eager"]


LINEAR = "nn.Linear(8, 8)"
BY_SIZE = "self.layer(x) if x.shape[0] > 1 else 2 * self.layer(x)"


@pytest.mark.parametrize(
    ("layer", "takes", "returns", "inputs"),
    [
        (LINEAR, "a, b", "self.layer(a) + b", ""),
        ("nn.LSTM(8, 8, batch_first=True)", "a", "self.layer(a)[0]", ""),
        ("nn.Embedding(9, 8)", "ids, other", "self.layer(ids) + self.layer(other)", ""),
        (LINEAR, "x", BY_SIZE, 'INPUTS = {"x": "float32[batch,8]"}'),
        (LINEAR, "a", "self.layer(a)", 'INPUTS = {"x": "float32[batch,8]"}'),
        (LINEAR, "a, b", "self.layer(a) + b", 'INPUTS = {"a": "float32[batch,8]"}'),
    ],
    ids=["two", "recurrent", "tokens", "path by size", "another name", "one is absent"],
)
def test_advised_inputs_of_a_module_can_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layer: str, takes: str, returns: str, inputs: str
) -> None:
    given = net(tmp_path, layer, takes, returns, inputs)
    code, said = ran(given, tmp_path, capsys)
    assert code in (2, 5), said
    options = advised(said, "input")
    assert options, said
    if "another name" in said or "no input named" in said:
        net(tmp_path, layer, takes, returns)  # that name is not declared any more
    code, said = ran([*given, *options], tmp_path, capsys)
    assert code == 0, (options, said)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.layer(a) + b


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_advised_inputs_of_torchscript_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.jit.script(Sum().eval()).save(str(tmp_path / "m.pt"))  # type: ignore[no-untyped-call]
    given = [str(tmp_path / "m.pt"), "--trust-code", "--backend", "eager"]
    code, said = ran(given, tmp_path, capsys)
    assert code == 2
    code, said = ran([*given, *advised(said, "input")], tmp_path, capsys)
    assert code == 0, said


@pytest.mark.openvino
@pytest.mark.parametrize(
    ("backend", "quant", "code"), [("eager", "nf4", 5), ("openvino", "nf4", 5), ("ort", "int8", 5)]
)
def test_an_advised_backend_takes_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, quant: str, code: int
) -> None:
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", 8]) for end in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    given = [str(tmp_path / "m.onnx"), "--backend", backend, "--quant", quant]
    found, said = ran(given, tmp_path, capsys)
    assert found == code, said
    hint = said.rpartition(". ")[2]
    options = [*advised(hint, "backend"), *advised(hint, "quant")]
    assert options, said
    assert ran([*given, *options], tmp_path, capsys)[0] == 0, options


def test_a_larger_error_is_advised_only_where_it_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from infer.results import Metric
    from infer.run import run_trial

    given = net(tmp_path, LINEAR, "x", "self.layer(x)", 'INPUTS = {"x": "float32[batch,8]"}')
    for metric, helps in (Metric("y", "relative_error", 0.5), True), (Metric("y", "non_finite", 3), False):
        monkeypatch.setattr(run_trial, "_compare", lambda *_, found=metric: ([found], {}, [], ""))
        code, said = ran(given, tmp_path, capsys)
        assert code == 4
        assert said.endswith("or allow more with --max-error") is helps, said
