"""torch's table of ONNX operators is built once for all exports of a process, and each export has a copy of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infer.graph import capture
from infer.onnx import export, operator_table
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
    monkeypatch.setattr(operator_table, "_tables", {})
    return tables


def test_layers_are_exported_with_one_table(built: list[Any]) -> None:
    before = registration.ONNXRegistry.__dict__["from_torchlib"]
    for columns in (8, 16):
        x = torch.randn(3, columns)
        specs = (TensorSpec("input", "float32", ("batch", columns)),)
        graph = capture.capture(nn.Linear(columns, 4).eval(), specs, {"input": x}, sizes={"batch": (1, 64)})
        model = export.to_ir(graph, "ort-u8s8")
        assert "Gemm" in {node.op_type for node in model.graph}
    assert len(built) == 1
    assert registration.ONNXRegistry.__dict__["from_torchlib"] is before


def test_operators_registered_in_one_export_are_not_in_the_next(built: list[Any]) -> None:
    target = torch.ops.aten.add.Tensor.name()
    with operator_table.built_once():
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
    with operator_table.built_once():
        assert not hasattr(registration, "ONNXRegistry")
