"""Outputs of the float original are computed once for the same inputs, by content, and never while it is timed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infer.graph.program import StreamedGraph
from infer.run.remembered_outputs import RememberedOutputs


class Counted:
    """A float form that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.calls += 1
        return {"y": next(iter(inputs.values())).float() * 2}


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).T,
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.tensor([float("nan"), 1.0]),
        torch.tensor([True, False]),
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.ones(2, dtype=torch.bfloat16),
    ],
    ids=["rows", "transposed", "scalar", "empty", "nan", "bool", "ids", "bfloat16"],
)
def test_the_same_inputs_are_computed_once(value: Tensor) -> None:
    form = Counted()
    known = RememberedOutputs(form)  # type: ignore[arg-type]
    first, second = known.run({"x": value}), known.run({"x": value.clone()})
    assert form.calls == 1
    assert torch.equal(first["y"], second["y"]) or value.isnan().any()


def test_other_values_shapes_names_and_dtypes_are_computed_anew() -> None:
    form = Counted()
    known = RememberedOutputs(form)  # type: ignore[arg-type]
    x = torch.zeros(2, 6)
    for inputs in ({"x": x}, {"x": x + 1}, {"x": x.reshape(3, 4)}, {"z": x}, {"x": x.int()}):
        known.run(inputs)
    assert form.calls == 5


def test_a_buffer_that_is_filled_again_is_other_inputs() -> None:
    form = Counted()
    known = RememberedOutputs(form)  # type: ignore[arg-type]
    x = torch.zeros(2, 3)
    known.run({"x": x})
    x += 1
    assert torch.equal(known.run({"x": x})["y"], torch.full((2, 3), 2.0))


def test_outputs_beyond_the_room_are_not_kept() -> None:
    form = Counted()
    known = RememberedOutputs(form, room=10)  # type: ignore[arg-type]
    known.run({"x": torch.ones(4)})
    known.run({"x": torch.ones(4)})
    assert form.calls == 2


def test_forms_that_are_timed_are_never_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    from infer import Plan
    from infer.run import float_reference

    monkeypatch.setattr(float_reference, "Eager", lambda graph: Counted())
    graph = StreamedGraph((), (), {}, module=nn.Identity())
    floats = float_reference.FloatReferences(graph, None)  # type: ignore[arg-type]
    forms, _ = floats.forms(Plan(source="m.pt"), [], None, lambda *_: None)
    assert [type(form) for form in forms.values()] == [Counted]
    assert isinstance(floats.reference(), RememberedOutputs)
