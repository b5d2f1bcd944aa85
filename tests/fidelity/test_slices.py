"""Slices, rows, choices and integers in their own units: what one number for a whole tensor hides."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from infer import Plan, fidelity, optimize
from infer.errors import GateError
from infer.fidelity.thresholds import LIMITS, limits

ROWS = 128
SOURCE = """
import torch

class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(64, 128), torch.nn.Tanh()]
        for _ in range(8):
            layers += [torch.nn.Linear(128, 128), torch.nn.Tanh()]
        self.scores = torch.nn.Sequential(*layers, torch.nn.Linear(128, 160))
        for layer in self.scores[::2]:
            torch.nn.init.normal_(layer.weight, std=2.5 / layer.in_features**0.5)

    def forward(self, x):
        boxes = (x[:, :40].sigmoid() * 640).view(-1, 1, 40).expand(-1, 2, -1).reshape(-1, 4, 20)
        return torch.cat((boxes, (self.scores(x) * 3).sigmoid().view(-1, 8, 20)), 1)

def build():
    torch.manual_seed(5)
    return Detector()
"""


def reason(expected: Tensor, got: Tensor, row: str = "4bit", task: str = "tensors") -> str:
    """Judge what is not said of the whole tensor."""
    found = fidelity.compare({"y": expected}, {"y": got}, task=task)
    kept = [metric for metric in found if metric.name not in ("relative_error", "cosine")]
    return fidelity.judge(kept, LIMITS[row], None) or ""


def values(expected: Tensor, got: Tensor, **inputs: Tensor) -> dict[str, object]:
    found = fidelity.compare({"y": expected}, {"y": got}, task="tensors", inputs=inputs)
    return {metric.name: metric.value for metric in found}


def scores(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


def noisy(value: Tensor, share: float) -> Tensor:
    return value + share * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))


def beside_pixels(value: Tensor, axis: int) -> Tensor:
    shape = list(value.shape)
    shape[axis] = 4
    return torch.cat((640 * torch.rand(shape, generator=torch.Generator().manual_seed(2)), value), axis)


LOST: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "channels beside boxes": (lambda y: beside_pixels(y.view(ROWS, 8, 20), 1), "axis 1 index 4..11"),
    "last axis beside boxes": (lambda y: beside_pixels(y.view(ROWS, 20, 8), 2), "axis 2 index 4..11"),
    "a masked column": (lambda y: torch.cat((torch.full((ROWS, 1), -1e4), y), 1), "axis 1 index 1..160"),
    "a common offset": (lambda y: y + 1000, "axis 1 index 0..159"),
    "pascals": (lambda y: torch.cat((101325 + 3 * scores(1, seed=3), y), 1), "axis 1 index 1..160"),
    "a first token": (
        lambda y: y.view(ROWS, 20, 8) + torch.eye(20)[0][:, None] * 1e3,
        "index",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_a_lost_slice_is_refused_by_name_and_its_twin_passes(case: str) -> None:
    place, words = LOST[case]
    y = scores(160)
    expected = place(y)
    assert words in reason(expected, place(noisy(y, 0.6)))
    for row, share in (("4bit", 0.12), ("int8", 0.03), ("float32", 1e-6)):
        assert reason(expected, place(noisy(y, share)), row) == ""


def test_the_mean_output_of_a_slice_is_no_answer() -> None:
    y = 5 + scores(6)
    got = y.clone()
    got[:, 3] = y[:, 3].mean()
    assert "axis 1 index 3: error relative to its deviation" in reason(y, got)
    assert float(str(values(y, got)["relative_error"])) < LIMITS["4bit"].relative_error  # type: ignore[operator]


def test_rounding_of_a_large_offset_is_no_loss_of_its_slice() -> None:
    y = 101325 + 0.05 * scores(3)  # six units of the last place
    exact = y.double()
    assert reason(y, (exact * (1 + 1e-8)).float().nextafter(torch.tensor(math.inf)), "float32") == ""
    assert reason(y, y + 0.5 * scores(3, seed=4), "4bit")


def test_columns_that_are_constant_or_rounding_alone_refuse_nothing() -> None:
    y = torch.cat((scores(6), torch.zeros(ROWS, 1), 1e-9 * scores(1, seed=5), torch.full((ROWS, 1), -1e4)), 1)
    got = torch.cat((y[:, :6], 1e-4 * scores(1), 1e-4 * scores(1), y[:, 8:]), 1)
    assert reason(y, got) == ""
    assert reason(y, noisy(y, 1e-7), "float32") == ""


def test_a_quiet_share_is_measured_in_the_unit_of_the_others() -> None:
    y = torch.cat((scores(4).sigmoid(), 1e-5 * torch.rand(ROWS, 1)), 1)
    got = y.clone()
    got[:, 4] *= 5
    assert reason(y, got) == ""
    got[:, 4] += 0.3
    assert "axis 1 index 4" in reason(y, got)


@pytest.mark.parametrize("row", ["float32", "int8", "4bit"])
def test_one_negated_row_of_a_hundred_is_refused(row: str) -> None:
    y = scores(32)
    got = y.clone()
    got[17] = -got[17]
    found = fidelity.compare({"y": y}, {"y": got}, task="tensors")
    rows = [metric for metric in found if metric.name == "worst_row_error"]
    assert "output 'y', row 17: error" in str(fidelity.judge(rows, LIMITS[row], None))


def test_a_huge_row_hides_no_other() -> None:
    y = scores(32)
    y[5] *= 1e6
    got = y.clone()
    got[17] = -got[17]
    assert "row 17" in reason(y, got)
    assert reason(y, y * 1.0001) == ""


def test_one_row_of_one_slice_is_named() -> None:
    y = beside_pixels(scores(8, 20).sigmoid(), 1)
    got = y.clone()
    got[9, 4:] = 1 - got[9, 4:]
    assert "row 9, axis 1 index" in reason(y, got)


def test_rows_near_zero_are_measured_against_the_usual_row() -> None:
    y = scores(32)
    y[3] *= 1e-6
    assert reason(y, noisy(y, 0.1)) == ""


def test_a_common_part_of_all_classes_hides_no_choice() -> None:
    y = 100 * scores(1) + scores(10, seed=6)
    wrong = y + 2 * scores(10, seed=7)
    assert "loss of the best class" in reason(y, wrong)
    assert values(y, y + 0.5 * scores(1))["choice_loss"] == 0


def test_late_positions_are_named_and_padding_is_no_slice() -> None:
    y = scores(48, 8)
    got = y.clone()
    got[:, 40:] = got[:, 39:40]
    assert "axis 1 index 40..47 of 48, its end" in reason(y, got, "float32")
    mask = torch.ones(ROWS, 48, dtype=torch.int64)
    mask[:, 40:] = 0
    assert values(y, got, attention_mask=mask)["worst_slice_error"] == 0


@pytest.mark.parametrize("place", [0, 17])
def test_a_position_of_texts_is_measured_in_the_unit_of_all_tokens(place: int) -> None:
    y = scores(24, 40)
    y[:, 0] = 3 + 0.02 * y[:, 0]  # what follows a first token hardly depends on it
    rounded, lost = noisy(y, 0.03), y.clone()
    lost[:, place] = noisy(y, 1.0)[:, place]
    refused = []
    for got in (rounded, lost):
        found = fidelity.compare({"logits": y}, {"logits": got}, task="text-generation")
        kept = [metric for metric in found if metric.name in ("worst_slice_error", "worst_row_error")]
        refused.append(fidelity.judge(kept, LIMITS["int8"], None) or "")
    assert not refused[0]
    assert f"axis 1 index {place}" in refused[1]
    assert "axis 1 index 0" in reason(
        y, rounded, "int8"
    )  # of anything else the places are no samples of one thing


def test_nine_decades_of_slices_are_judged_and_what_lies_far_below_is_not() -> None:
    y = scores(48)
    y[:, 20:] *= 1e-23  # most units of a state may be shut
    got = torch.cat((noisy(y[:, :20], 0.02), 3 * y[:, 20:]), 1)
    assert not reason(y, got, "int8")
    y[:, 20:] *= 1e14  # powers fall so far from the first band to the last
    got = torch.cat((noisy(y[:, :20], 0.02), 3 * y[:, 20:]), 1)
    assert "axis 1 index 20..47" in reason(y, got, "int8")


def test_slices_over_batches_are_those_of_the_whole() -> None:
    y, got = scores(5, 6), noisy(scores(5, 6), 0.1)
    parts = fidelity.Comparison("tensors")
    for begin in range(0, ROWS, 8):
        parts.add({"y": y[begin : begin + 8]}, {"y": got[begin : begin + 8]})
    found = {metric.name: metric.value for metric in parts.metrics()}
    assert found["worst_slice_error"] == pytest.approx(values(y, got)["worst_slice_error"])
    assert found["choice_loss"] == pytest.approx(values(y, got)["choice_loss"])


@pytest.mark.parametrize("size", [1e-40, 1e-24, 1.0, 1e20, 1e37])
def test_the_cosine_does_not_depend_on_the_magnitude(size: float) -> None:
    y = scores(16) * size
    assert values(y, y.clone())["cosine"] == pytest.approx(1)
    assert values(y, -y)["cosine"] == pytest.approx(-1)


def test_rows_of_nothing_have_no_direction() -> None:
    y = scores(16)
    y[::2] = 0.0
    got = y.clone()
    got[::2] = 1e-30  # as one library rounds what is zero in another
    assert values(y, got)["cosine"] == pytest.approx(1)
    got[::2] = 1e-9
    assert values(y, got)["cosine"] == pytest.approx(0.5)


def test_the_rounding_of_one_is_no_error_of_a_quiet_share() -> None:
    """A map of text without text: sigmoids of 1e-6 that each library rounds to other units in the last place of 1."""
    y = scores(64).sigmoid()
    y[1:] *= 1e-6
    rounded = (y + 1).sub(1).clamp(min=0)
    assert (rounded - y).norm(dim=1)[1:].div(y.norm(dim=1)[1:]).min() > 0.02
    assert values(y, rounded)["cosine"] > LIMITS["float32"].cosine
    lost = torch.where(y > 1e-4, y, 0.0)
    assert values(y, lost)["cosine"] < LIMITS["float32"].cosine


def test_the_rounding_of_one_is_that_of_each_row_whatever_its_length() -> None:
    """Batches of short and long rows are judged alike in either order."""
    short, long = (torch.full((4, width), 1e-5) for width in (4, 4096))
    short[0, 0] = long[0, 0] = 1.0
    found = []
    for batches in ((short, long), (long, short)):
        both = fidelity.Comparison("tensors")
        for y in batches:
            both.add({"y": y}, {"y": torch.where(y == 1, y, 0.0)})
        found.append(next(m.value for m in both.metrics() if m.name == "cosine_min"))
    assert found[0] == pytest.approx(found[1])
    assert found[0] == pytest.approx(1 / (1 + (1e-5 / (128 * torch.finfo(torch.float32).eps)) ** 2) ** 0.5)


def test_a_rare_flag_that_is_never_raised_is_refused() -> None:
    flag = torch.zeros(256, dtype=torch.bool)
    flag[[3, 70, 90]] = True
    assert "worst_value" in reason(flag, torch.zeros_like(flag))
    assert "y.exact" in reason(flag, torch.zeros_like(flag), "float32")
    assert reason(flag, flag.clone(), "float32") == ""


def test_an_absurd_index_is_refused_at_any_precision() -> None:
    index = torch.arange(256) % 10
    got = index.clone()
    got[9] = 1000
    for row in LIMITS:
        assert "has the value 1000" in reason(index, got, row)


def test_ties_explain_another_best_class_and_nothing_else_does() -> None:
    y = scores(6)
    y[4, 1] = y[4, 2] = 9.0
    best = y.argmax(1)
    for other, passes in ((2, True), (3, False)):
        chosen = best.clone()
        chosen[4] = other
        found = fidelity.compare({"y": y, "best": best}, {"y": y, "best": chosen}, task="tensors")
        assert (fidelity.judge(found, LIMITS["float32"], None) is None) == passes
        assert fidelity.judge(found, LIMITS["4bit"], None) is None


def test_integers_that_nothing_rounds_are_exact_in_every_class() -> None:
    compared = fidelity.Comparison("tensors", integers=["y"])
    ids = torch.arange(256) % 10
    got = ids.clone()
    got[9] = 8
    compared.add({"y": ids}, {"y": got})
    assert "9 became 8" in str(fidelity.judge(compared.metrics(), LIMITS["2bit"], None))


def test_max_drop_holds_for_the_worst_slice_too() -> None:
    allowed = limits(Plan(source="m.pt", max_drop=0.05), "tensors")
    y = beside_pixels(scores(8, 20).sigmoid(), 1)
    got = torch.cat((y[:, :4], noisy(y[:, 4:], 0.1)), 1)
    found = fidelity.compare({"y": y}, {"y": got}, task="tensors")
    assert (allowed.relative_error, allowed.worst_slice) == (0.05, 0.1)
    assert allowed.is_budget
    assert "axis 1 index 4..11" in str(fidelity.judge(found, allowed, None))
    assert fidelity.drop(found, "tensors") > 0.1


def test_scores_beside_boxes_are_refused_or_kept_finer(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SOURCE)
    space: dict[str, Callable[[], torch.nn.Module]] = {}
    exec(SOURCE, space)  # noqa: S102 - the text above
    torch.save(space["build"]().state_dict(), tmp_path / "model.pt")
    np.savez(tmp_path / "x.npz", x=scores(64).numpy())
    plan = Plan(
        source=str(tmp_path / "model.pt"),
        model=f"{tmp_path / 'model.py'}:build",
        data=str(tmp_path / "x.npz"),
        inputs=("x=float32[batch,64]",),
        backend="eager",
        quant="nf4",
        batches=(),
        allow_slower=True,
    )
    pinned = plan.with_(layers={"*": "nf4"})
    with pytest.raises(GateError, match=r"output 'output', axis 1 index 4\.\.11: error relative to its dev"):
        optimize(pinned, tmp_path / "pinned.infer")
    made = optimize(plan, tmp_path / "model.infer").manifest
    finer = [layer for layer in made.layers if layer.format in ("int8", "fp16")]
    assert finer
    assert all(layer.why.startswith("rose ") for layer in finer)


def test_one_short_row_is_judged_in_the_units_of_the_others() -> None:
    whole = fidelity.Comparison("tensors")
    rows = scores(12, 16)
    whole.add({"y": rows}, {"y": noisy(rows, 0.02)})
    short = scores(1, 16, seed=1)[:1]
    short[0, 0, 3] = 1e-6  # by chance nearly zero
    for share, most in ((0.02, 0.1), (1.0, math.inf)):
        fewer = whole.of_other_rows()
        fewer.add({"y": short}, {"y": noisy(short, share)})
        (error,) = [m.value for m in fewer.metrics() if m.name == "worst_slice_error"]
        assert isinstance(error, float)
        assert (error < most) if share < 1 else error > 0.5


def test_padded_places_are_no_best_place() -> None:
    rows, mask = scores(9, 6), torch.ones(ROWS, 9, dtype=torch.int64)
    mask[:, 6:] = 0
    wrong = rows.clone()
    wrong[:, 6:] = 50.0
    assert values(rows, wrong, attention_mask=mask)["choice_loss"] == 0.0


def test_float64_may_not_be_computed_in_float32() -> None:
    seconds = 1.7e9 + 1000 * torch.rand(32, 2, dtype=torch.float64)
    found = values(seconds, seconds.float().double())
    assert isinstance(error := found["worst_slice_error"], float)
    assert error > LIMITS["float32"].worst_slice  # type: ignore[operator]
    cast = seconds.float().double()  # the float model itself computes in float32, and casts at the end
    assert values(cast, cast + 64)["worst_slice_error"] == 0.0


def test_outputs_that_no_row_changes_are_named() -> None:
    y, shut = scores(5), torch.full((ROWS, 3), 0.25)
    shut[:, 1] += 1e-9 * scores(1)[:, 0]  # rounding of what is constant
    compared = fidelity.Comparison("tensors")
    for begin in range(0, ROWS, 8):
        part = {"y": y[begin : begin + 8], "shut": shut[begin : begin + 8]}
        compared.add(part, part)
    assert compared.constant_outputs() == ["shut"]
    few = fidelity.Comparison("tensors")
    few.add({"y": y[:1]}, {"y": y[:1]})
    assert few.constant_outputs() == []  # one row tells nothing
