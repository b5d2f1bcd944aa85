"""The limits of the gate as the documentation gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer import Plan
from infer.fidelity.thresholds import LIMITS, limits


def test_the_cookbook_lists_the_limits_as_they_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/cookbook.md").read_text()
    table = page.partition("| precision | whole output |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = {row[0]: row[1:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)}
    assert {"float32", "int8", "4bit"} <= set(listed)
    for name, cells in listed.items():
        row = LIMITS[name]
        shares = [f"{100 * share:g} %" for share in (row.exact, row.top1) if share is not None]
        figures = [f"{x:g}" for x in (row.relative_error, row.worst_slice, row.worst_row, row.choice) if x]
        assert cells == [*figures, *shares], name


@pytest.mark.parametrize(
    ("quant", "row", "share"), [("int8", "int8", 0.75), ("nf4", "4bit", 0.75), ("none", "float32", 1)]
)
def test_errors_on_inputs_of_ours_are_held_to_three_quarters(quant: str, row: str, share: float) -> None:
    found = limits(Plan(source="m.onnx", quant=quant, data="ours", backend="eager"), "tensors")
    for name in ("relative_error", "worst_slice", "worst_row", "choice"):
        assert getattr(found, name) == share * getattr(LIMITS[row], name)
    assert (found.top1, found.exact) == (LIMITS[row].top1, LIMITS[row].exact)
