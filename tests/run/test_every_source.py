"""Every kind of source that holds the same model goes down the street to the same answers, quantized."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from infer import Plan, Predictor, optimize

NET = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(1024, 128), nn.Linear(128, 10)

    def forward(self, image):
        return self.down(self.up(self.conv(image).relu().flatten(1)).relu())

def build():
    torch.manual_seed(0)
    return Net().eval()

def rows():
    return {"image": np.random.default_rng(0).random((64, 1, 8, 8), dtype=np.float32)}
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a small classifier, importable by name as a pickle needs it."""
    file = tmp_path_factory.mktemp("sources") / "net_of_every_source.py"
    file.write_text(NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(file.parent)
        yield file


def state_dict(model: nn.Module, image: torch.Tensor, path: Path, net: Path) -> Plan:
    torch.save(model.state_dict(), path)
    return Plan(source=str(path), model=f"{net}:build")


def safetensors(model: nn.Module, image: torch.Tensor, path: Path, net: Path) -> Plan:
    save_file(model.state_dict(), path)
    return Plan(source=str(path), model=f"{net}:build")


def pickled(model: nn.Module, image: torch.Tensor, path: Path, net: Path) -> Plan:
    torch.save(model, path)
    return Plan(source=str(path), trust_code=True, inputs=("image=float32[batch,1,8,8]",))


def torchscript(model: nn.Module, image: torch.Tensor, path: Path, net: Path) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(model, image[:2]), path)
    return Plan(source=str(path), trust_code=True, inputs=("image=float32[batch,1,8,8]",))


def exported(model: nn.Module, image: torch.Tensor, path: Path, net: Path) -> Plan:
    shapes = {"image": {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(model, (), {"image": image[:2]}, dynamic_shapes=shapes, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)
    return Plan(source=str(path), trust_code=True)


def onnx(model: nn.Module, image: torch.Tensor, path: Path, net: Path) -> Plan:
    pytest.importorskip("onnxscript")
    shapes = {"image": {0: torch.export.Dim("batch", min=1, max=64)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (),
            path,
            kwargs={"image": image[:2]},
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )
    return Plan(source=str(path), backend="ort")


@pytest.mark.parametrize("make", [state_dict, safetensors, pickled, torchscript, exported, onnx])
def test_a_source_of_every_kind_becomes_int8_and_stays_faithful(
    net: Path, tmp_path: Path, make: Callable[..., Plan]
) -> None:
    recipe = importlib.import_module(net.stem)
    model, image = recipe.build(), torch.from_numpy(recipe.rows()["image"])
    plan = make(model, image, tmp_path / "model.pt", net)
    backend = "eager" if plan.backend == "auto" else plan.backend
    asked = plan.with_(data=f"{net}:rows", backend=backend, quant="int8", batches=(), allow_slower=True)
    made = optimize(asked, tmp_path / "model.infer")
    with torch.no_grad():
        expected = model(image).numpy()
    with Predictor.load(made.path) as predictor:
        got = predictor.predict({"image": image.numpy()})
    (answer,) = got.values()
    assert np.linalg.norm(answer - expected) < 0.05 * np.linalg.norm(expected)
    assert np.abs(answer - expected).max() > 0, "int8 can't be equal to the bit: nothing was quantized"
