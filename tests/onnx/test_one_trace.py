"""An export traces the whole program once: our operators are decomposed together with those of torch's exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

pytest.importorskip("torch.onnx._internal.exporter._fx_passes")

from infer.errors import NotUsableError  # noqa: E402
from infer.graph import capture  # noqa: E402
from infer.graph.program import Graph  # noqa: E402
from infer.onnx import decompositions  # noqa: E402
from infer.onnx import export as exporter  # noqa: E402
from infer.spec import TensorSpec  # noqa: E402


class Masked(nn.Module):
    """Attention behind a mask of keys, which we decompose, and `glu`, which the exporter does."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, mask[:, None, None, :] > 0)
        return F.glu(out.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.glu(x)


def masked() -> Graph:
    specs = (
        TensorSpec("x", "float32", ("batch", "seq", 8)),
        TensorSpec("mask", "int64", ("batch", "seq")),
    )
    samples = {"x": torch.randn(3, 5, 8), "mask": torch.ones(3, 5, dtype=torch.int64)}
    return capture.capture(Masked().eval(), specs, samples, sizes={"batch": (1, 64), "seq": (1, 32)})


def operators(of: Graph) -> list[str]:
    exporter._exported.clear()
    return [node.op_type for node in exporter.to_ir(of).graph]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """Collect the programs that are traced again to decompose them."""
    found: list[ExportedProgram] = []
    usual = ExportedProgram.run_decompositions

    def counted(self: ExportedProgram, *args: Any, **named: Any) -> ExportedProgram:
        found.append(self)
        return usual(self, *args, **named)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return found


def test_a_program_with_our_operators_is_traced_once(traces: list[ExportedProgram]) -> None:
    made = masked()
    traces.clear()
    assert "Softmax" in operators(made)
    assert len(traces) == 1


def test_one_without_is_traced_once_too(traces: list[ExportedProgram]) -> None:
    specs = (TensorSpec("x", "float32", ("batch", 8)),)
    made = capture.capture(Plain().eval(), specs, {"x": torch.randn(3, 8)}, sizes={"batch": (1, 64)})
    traces.clear()
    assert operators(made)
    assert len(traces) == 1


def test_two_traces_give_the_same_operators(
    traces: list[ExportedProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = masked()
    once = operators(made)
    monkeypatch.setattr(decompositions, "_exporter_modules", lambda: (None, None))  # as of another torch
    traces.clear()
    assert operators(made) == once
    assert len(traces) == 2


def test_the_exporter_is_left_as_it_was() -> None:
    from torch.onnx._internal.exporter import _fx_passes

    usual = _fx_passes.decompose_with_registry
    operators(masked())
    assert _fx_passes.decompose_with_registry is usual


def test_a_refusal_of_a_decomposition_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def refusing(target: str) -> Iterator[bool]:
        from torch.onnx._internal.exporter import _fx_passes

        def decomposed(program: ExportedProgram, registry: Any) -> ExportedProgram:
            raise NotUsableError("no form for this layer", hint="Use another")

        with monkeypatch.context() as patch:
            patch.setattr(_fx_passes, "decompose_with_registry", decomposed)
            yield True

    monkeypatch.setattr(exporter, "within_export", refusing)
    with pytest.raises(NotUsableError, match="^no form for this layer. Use another$"):
        operators(masked())
