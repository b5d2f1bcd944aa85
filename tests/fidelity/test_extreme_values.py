"""Faults that only show at values which the rows do not hold are refused; what the original leaves open is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backends import eager
from infer import Plan, optimize
from infer.errors import GateError
from infer.fidelity.extreme_values import places
from infer.run.stages import Outcome
from infer.spec import TensorSpec

Outputs = dict[str, Tensor]
FLOATS = {"x": torch.linspace(-1, 1, 32 * 8).reshape(32, 8)}
IDS = {"x": (torch.arange(32 * 8) * 7 % 61 * 2).reshape(32, 8)}  # whose sums are even


class Square(nn.Module):
    """Take numbers of any size."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean(1, keepdim=True) + x


class Sums(nn.Module):
    """Take whole numbers; their sums reach beyond 2^24."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 40_001).sum(1)


class Switched(nn.Module):
    """Give an order that the original does not determine where all numbers are equal."""

    def forward(self, x: Tensor) -> Tensor:
        turned = x * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
        return torch.softmax(turned * 1e6, 1).argmax(1)


def made(model: nn.Module, data: Mapping[str, Tensor], folder: Path, **options: object) -> Outcome:
    torch.save(model, folder / "model.pt")
    torch.save(dict(data), folder / "data.pt")
    kind = str(data["x"].dtype).removeprefix("torch.")
    plan = Plan(
        source=str(folder / "model.pt"),
        data=str(folder / "data.pt"),
        inputs=(f"x={kind}[batch,8]",),
        backend="eager",
        trust_code=True,
        batches=(),
        **options,  # type: ignore[arg-type]
    )
    return optimize(plan, folder / "model.infer")


def wrong(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change what the optimized model gives, by its inputs and right outputs."""
    run = eager.Runner.run

    def changed(self: eager.Runner, inputs: Mapping[str, Tensor]) -> Outputs:
        return {name: change(inputs["x"], value) for name, value in run(self, inputs).items()}

    monkeypatch.setattr(eager.Runner, "run", changed)


@pytest.mark.parametrize(
    ("model", "data", "change", "where"),
    [
        (Square(), FLOATS, lambda x, y: y.clamp(max=3.0), "values x .25 to 4"),
        (Square(), FLOATS, lambda x, y: y.clamp(max=400.0), "values x 100"),
        (Square(), FLOATS, lambda x, y: torch.where((x == 0).all(1, keepdim=True), 1.0, y), "values of zero"),
        (Square(), FLOATS, lambda x, y: torch.where((x == 1).all(1, keepdim=True), 0.0, y), "of their range"),
        (Sums(), IDS, lambda x, y: y.float().long(), "values of their range"),
    ],
    ids=["saturated", "clipped far off", "silence", "ends", "sums in float32"],
)
def test_a_fault_at_values_the_rows_do_not_hold_is_refused(
    model: nn.Module,
    data: Mapping[str, Tensor],
    change: Callable[[Tensor, Tensor], Tensor],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong(monkeypatch, change)
    with pytest.raises(GateError, match=where):
        made(model, data, tmp_path)


@pytest.mark.parametrize(
    ("model", "data"),
    [(Square(), FLOATS), (Sums(), IDS), (Switched(), FLOATS)],
    ids=["floats", "ids", "order"],
)
def test_a_model_that_is_right_everywhere_passes(
    model: nn.Module, data: Mapping[str, Tensor], tmp_path: Path
) -> None:
    found = {f.what for f in made(model, data, tmp_path).manifest.findings if f.stage == "compare"}
    assert any("at values of their range" in what or "values of their range." in what for what in found)


def test_what_rounding_of_the_inputs_moves_is_not_judged() -> None:
    """The order of equal numbers is open: any answer there counts as the original's."""
    specs = (TensorSpec("x", "float32", ("batch", 8)),)

    def order(flip: bool) -> Callable[[Mapping[str, Tensor]], Outputs]:
        return lambda inputs: {"y": (inputs["x"] * 1e12).sin() * (-1 if flip else 1), "z": inputs["x"].sum(1)}

    for _, inputs, run in places(specs, FLOATS, {"batch": (1, 32)}, {}, order(False), order(True)):
        expected, got = order(False)(inputs), run(inputs)
        moved = inputs["x"].abs() > 10
        assert torch.equal(expected["y"][moved], got["y"][moved])
        assert torch.equal(expected["z"], got["z"])


def test_masks_and_inputs_without_rows_stay_as_they_are() -> None:
    specs = (
        TensorSpec("x", "float32", ("batch", 8)),
        TensorSpec("mask", "int64", ("batch", 8)),
        TensorSpec("table", "float32", (3,)),
    )
    samples = {**FLOATS, "mask": (torch.arange(256) % 2).reshape(32, 8), "table": torch.arange(3.0)}

    def same(inputs: Mapping[str, Tensor]) -> Outputs:
        return {"y": inputs["x"]}

    for _, inputs, _ in places(specs, samples, {"batch": (1, 32)}, {}, same, same):
        assert torch.equal(inputs["table"], samples["table"])
        assert set(inputs["mask"].unique().tolist()) == {0, 1}
        assert not torch.equal(inputs["x"][:1], samples["x"][:1])


def test_rows_that_come_in_threes_are_asked_for_in_threes() -> None:
    specs = (TensorSpec("x", "float32", ("batch", 8)),)

    def threes(inputs: Mapping[str, Tensor]) -> Outputs:
        return {"y": inputs["x"].reshape(-1, 3, 8).sum(1)}

    for _, inputs, run in places(specs, FLOATS, {"batch": (3, 30)}, {"batch": 3}, threes, threes):
        assert len(inputs["x"]) % 3 == 0
        assert run(inputs)["y"].shape == (len(inputs["x"]) // 3, 8)


@pytest.mark.parametrize(("seconds", "rows"), [(0.1, 2), (1.0, 1)])
def test_a_model_that_is_known_to_be_slow_is_asked_for_few_rows(seconds: float, rows: int) -> None:
    specs, counts = (TensorSpec("x", "float32", ("batch", 8)),), list[int]()

    def same(inputs: Mapping[str, Tensor]) -> Outputs:
        counts.append(len(inputs["x"]))
        return {"y": inputs["x"]}

    for _, inputs, _ in places(specs, FLOATS, {"batch": (1, 32)}, {}, same, same, row_seconds=seconds):
        assert len(inputs["x"]) == rows
    assert set(counts) <= {rows}
