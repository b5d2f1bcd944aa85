"""Differences that rounding of the inputs makes in the original do not count; what lies beyond them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends import eager
from infer import Plan, Predictor, optimize
from infer.errors import GateError
from infer.fidelity.input_rounding import beyond_rounding
from infer.run.stages import Outcome
from infer.spec import TensorSpec

Outputs = dict[str, Tensor]
STEP = 1 / 64
ROWS = (32 + torch.arange(32 * 8) * 37 % 96).reshape(32, 8) * STEP  # on the edges of the steps


class Steps(nn.Module):
    """Give steps of a sixty-fourth beside numbers that rounding hardly moves."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.floor(x * 64) / 64, x * 3


def answered(run: Callable[[Tensor], Outputs], x: Tensor) -> Outputs:
    spec = TensorSpec("x", "float32", ("batch", x.shape[1]))
    named: Callable[[Mapping[str, Tensor]], Outputs] = lambda given: run(given["x"])  # noqa: E731
    reference = lambda given: {"y": torch.floor(given["x"])}  # noqa: E731
    return dict(beyond_rounding(reference, named, (spec,))({"x": x}))


def test_a_step_that_rounding_of_the_input_takes_is_no_difference() -> None:
    x = torch.tensor([[1.0, 1.5, 2.0, 2.5]])
    got = answered(lambda given: {"y": torch.floor(given) - torch.tensor([[1.0, 0.0, 1.0, 0.0]])}, x)
    assert torch.equal(got["y"], torch.floor(x))


def test_what_lies_beyond_the_steps_remains() -> None:
    x = torch.tensor([[1.0, 1.5, 2.0, 2.5]])
    got = answered(lambda given: {"y": torch.floor(given) + 5}, x)
    assert torch.equal(got["y"], torch.tensor([[4.0, 6.0, 5.0, 7.0]]))  # 2 steps nearer at the edges alone


def test_values_that_hold_still_are_judged_as_they_are() -> None:
    x = torch.tensor([[1.25, 1.5, 2.75, 2.5]])
    got = answered(lambda given: {"y": torch.floor(given) + 1e-3}, x)
    assert torch.equal(got["y"], torch.floor(x) + 1e-3)


MOSTLY = torch.tensor(
    [[32.0, 0.5], [33.0, 0.5], [34.0, 0.5], [34.5, 0.5]]
)  # three of four rows on the edge of a step


def test_a_row_that_stayed_by_chance_has_the_room_of_the_others() -> None:
    got = answered(lambda given: {"y": torch.floor(given) + torch.tensor([1.0, 0.0])}, MOSTLY)
    assert torch.equal(got["y"], torch.floor(MOSTLY))
    beyond = answered(lambda given: {"y": torch.floor(given) + torch.tensor([9.0, 0.0])}, MOSTLY)
    assert (beyond["y"] - torch.floor(MOSTLY))[:, 0].min() > 6


def test_a_steady_place_has_no_room_beside_one_that_steps() -> None:
    got = answered(lambda given: {"y": torch.floor(given) + torch.tensor([0.0, 0.01])}, MOSTLY)
    assert torch.equal(got["y"][:, 1], torch.floor(MOSTLY)[:, 1] + 0.01)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_values_that_are_lost_stay_lost(wrong: float) -> None:
    got = answered(lambda given: {"y": torch.full_like(given, wrong)}, torch.tensor([[1.0, 1.5]]))
    assert not got["y"].isfinite().any()


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Outputs], Outputs]) -> Outcome:
    """Optimize the steps with an engine that rounds its inputs down, and changes its outputs."""
    torch.save(Steps(), folder / "model.pt")
    torch.save({"x": ROWS}, folder / "data.pt")
    run = eager.Runner.run

    def rounded(self: eager.Runner, inputs: Mapping[str, Tensor]) -> Outputs:
        return change(dict(run(self, {"x": inputs["x"] * (1 - 2**-22)})))

    monkeypatch.setattr(eager.Runner, "run", rounded)
    plan = Plan(
        source=str(folder / "model.pt"),
        data=str(folder / "data.pt"),
        inputs=("x=float32[batch,8]",),
        backend="eager",
        trust_code=True,
        batches=(),
    )
    return optimize(plan, folder / "model.infer")


def test_a_form_that_steps_elsewhere_is_published_with_that_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = made(tmp_path, monkeypatch, lambda outputs: outputs)
    said = " ".join(Predictor.load(result.path, trust_code=True).report["verdict"])
    assert "differences that rounding makes in the original too do not count: " in said
    assert "is above 0.001 allowed for float32" in said


@pytest.mark.parametrize(("output", "factor"), [(1, 1.01), (0, 1.3)])
def test_what_is_wrong_beside_the_steps_is_refused(
    output: int, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(outputs: Outputs) -> Outputs:
        name = list(outputs)[output]
        return {**outputs, name: outputs[name] * factor}

    with pytest.raises(GateError, match="not faithful enough"):
        made(tmp_path, monkeypatch, wrong)
