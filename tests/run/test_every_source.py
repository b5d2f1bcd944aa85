"""Every kind of source that holds the same model goes down the street to the same answers, quantized."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from infer import Plan, Predictor, optimize

MODELS = Path(__file__).resolve().parents[2] / "models"
RECIPE = f"{MODELS / 'digits.py'}:build"
DATA = f"{MODELS / 'digits.py'}:example_inputs"


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, torch.Tensor]:
    """Load the trained classifier, importable by name as a pickle needs it, and 64 held-out images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MODELS)
        recipe = importlib.import_module("digits")
        model = recipe.build()
        model.load_state_dict(torch.load(MODELS / "digits.pt", weights_only=True))
        yield model.eval(), recipe.example_inputs()["image"]


def state_dict(model: nn.Module, image: torch.Tensor, path: Path) -> Plan:
    torch.save(model.state_dict(), path)
    return Plan(source=str(path), model=RECIPE)


def safetensors(model: nn.Module, image: torch.Tensor, path: Path) -> Plan:
    save_file(model.state_dict(), path)
    return Plan(source=str(path), model=RECIPE)


def pickled(model: nn.Module, image: torch.Tensor, path: Path) -> Plan:
    torch.save(model, path)
    return Plan(source=str(path), trust_code=True, inputs=("image=float32[batch,1,8,8]",), data=DATA)


def torchscript(model: nn.Module, image: torch.Tensor, path: Path) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(model, image[:2]), path)
    return Plan(source=str(path), trust_code=True, inputs=("image=float32[batch,1,8,8]",), data=DATA)


def exported(model: nn.Module, image: torch.Tensor, path: Path) -> Plan:
    shapes = {"image": {0: torch.export.Dim("batch", min=1, max=64)}}
    program = torch.export.export(model, (), {"image": image[:2]}, dynamic_shapes=shapes, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)
    return Plan(source=str(path), trust_code=True, data=DATA)


def onnx(model: nn.Module, image: torch.Tensor, path: Path) -> Plan:
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
    return Plan(source=str(path), data=DATA, backend="ort")


@pytest.mark.parametrize("make", [state_dict, safetensors, pickled, torchscript, exported, onnx])
def test_a_source_of_every_kind_becomes_int8_and_stays_faithful(
    digits: tuple[nn.Module, torch.Tensor], tmp_path: Path, make: Callable[..., Plan]
) -> None:
    model, image = digits
    plan = make(model, image, tmp_path / "model.pt")
    backend = "eager" if plan.backend == "auto" else plan.backend
    made = optimize(
        plan.with_(backend=backend, quant="int8", batches=(), allow_slower=True), tmp_path / "model.infer"
    )
    with torch.no_grad():
        expected = model(image).numpy()
    with Predictor.load(made.path) as predictor:
        got = predictor.predict({"image": image.numpy()})
    (answer,) = got.values()
    assert np.linalg.norm(answer - expected) < 0.05 * np.linalg.norm(expected)
    assert np.abs(answer - expected).max() > 0, "int8 can't be equal to the bit: nothing was quantized"
