"""torch's table of ONNX operators: built once for all exports of a process, copied for each, and mended."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from infer.graph import capture
from infer.onnx import export
from infer.spec import TensorSpec

registration = pytest.importorskip("torch.onnx._internal.exporter._registration")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the tables that torch builds; none is known from before."""
    tables: list[Any] = []
    usual = registration.ONNXRegistry.__dict__["from_torchlib"]

    def counted(cls: Any, *args: Any, **named: Any) -> Any:
        tables.append(usual.__get__(None, cls)(*args, **named))
        return tables[-1]

    monkeypatch.setattr(registration.ONNXRegistry, "from_torchlib", classmethod(counted))
    monkeypatch.setattr(export, "_tables", {})
    return tables


def test_layers_are_exported_with_one_table(built: list[Any]) -> None:
    before = registration.ONNXRegistry.__dict__["from_torchlib"]
    for columns in (8, 16):
        x = torch.randn(3, columns)
        specs = (TensorSpec("input", "float32", ("batch", columns)),)
        graph = capture.capture(nn.Linear(columns, 4).eval(), specs, {"input": x}, sizes={"batch": (1, 64)})
        model = export.to_ir(graph)
        assert "Gemm" in {node.op_type for node in model.graph}
    assert len(built) == 1
    assert registration.ONNXRegistry.__dict__["from_torchlib"] is before


def test_operators_registered_in_one_export_are_not_in_the_next(built: list[Any]) -> None:
    target = torch.ops.aten.add.Tensor.name()
    with export.table_built_once():
        first = registration.ONNXRegistry.from_torchlib()
        count = len(first.functions[target])
        first.functions[target].append(object())
        first.functions["own::operator"] = [object()]
        second = registration.ONNXRegistry.from_torchlib()
    assert len(built) == 1
    assert len(second.functions[target]) == count
    assert "own::operator" not in second.functions


def test_a_torch_without_such_a_table_exports_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(registration, "ONNXRegistry")
    with export.table_built_once():
        assert not hasattr(registration, "ONNXRegistry")


class Remainders(nn.Module):
    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.remainder(x, 2.5), i % 3, torch.arange(2 * x.shape[0]) % x.shape[0]


def test_a_remainder_by_a_symbolic_size_has_the_sign_of_the_divisor(tmp_path: Path) -> None:
    x, i = 9 * torch.randn(5, 3), torch.arange(-7, 8)
    program = torch.export.export(
        Remainders(), (x, i), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)}, None)
    )
    with warnings.catch_warnings(action="ignore"):  # deprecations inside torch
        exported = torch.onnx.export(
            program, (), custom_translation_table=export.mended_operators(), verbose=False
        )
    assert exported is not None
    exported.save(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    x = 9 * torch.randn(7, 3)
    names = [value.name for value in session.get_inputs()]
    got = session.run(None, dict(zip(names, (x.numpy(), i.numpy()), strict=True)))
    for one, other in zip(got, Remainders()(x, i), strict=True):
        np.testing.assert_array_equal(one, other.numpy())
