"""Candidates of a search: variants that format files declare, dtypes that backends declare."""

from __future__ import annotations

import pytest

from infer import device as hardware
from infer.budget_search import space
from infer.budgets import Budgets
from infer.plan import Plan
from infer.report.search_record import Candidate

PLAN = Plan(source="model.pt")


def test_formats_are_the_variants_that_their_files_declare() -> None:
    found = space.formats(PLAN, Budgets())
    assert found[0] == "none"
    assert {"int8", "int8:weight", "nf4"} <= set(found)
    assert "keep" not in found


@pytest.mark.openvino
@pytest.mark.parametrize("units", [True, False])
def test_the_best_backend_is_tried_in_its_fast_dtypes(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(hardware, "has_bfloat16", lambda: units)
    best = Candidate(backend="openvino")
    found = space.refinements(best, PLAN, Budgets(), generates=False)
    assert found == ([Candidate(backend="openvino", dtype="bfloat16")] if units else [])
