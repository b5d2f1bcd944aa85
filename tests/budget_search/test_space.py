"""Candidates of a search: variants that format files declare, dtypes that backends declare."""

from __future__ import annotations

import pytest

from infer import device as hardware
from infer.budget_search import space
from infer.budgets import Budgets
from infer.plan import Plan
from infer.report.search_record import Candidate

PLAN = Plan(source="model.pt", device="cpu")


def test_formats_are_the_variants_that_their_files_declare() -> None:
    found = space.formats(PLAN, Budgets())
    assert found[0] == "none"
    assert {"int8", "int8:weight", "nf4"} <= set(found)
    assert {"keep", "fp8", "fp4"}.isdisjoint(found)  # for codes of a source, and for GPUs


def test_float_on_backends_that_compile_code_comes_after_the_formats() -> None:
    asked = Budgets(space={"backend": ("eager", "ort", "inductor"), "quant": ("none", "nf4", "int8")})
    floats, first, others = space.first_candidates(PLAN, asked)
    assert [one.label for one in floats] == ["eager float", "ort float"]
    assert [one.label for one in first] == ["eager int8", "eager nf4"], "formats that compute faster first"
    assert others[-1] == Candidate(backend="inductor")
    alone = space.first_candidates(PLAN.with_(backend="inductor"), Budgets())
    assert alone[0] == [Candidate(backend="inductor")], "nothing else could be timed against"


def test_a_kv_type_with_fewer_bits_is_tried_where_memory_counts() -> None:
    best = Candidate(backend="eager", quant="int8")
    for tried, kinds in ((best, ["int8"]), (Candidate(backend="eager"), ["float16", "int8"])):
        found = space.refinements(tried, PLAN, Budgets(max_memory=10**9), generates=True)
        assert [c.kv_dtype for c in found] == kinds  # of a quantized model float16 is what "auto" means
    assert space.refinements(best, PLAN, Budgets(), generates=True) == []
    assert space.refinements(best, PLAN, Budgets(max_memory=10**9), generates=False) == []


def test_float_in_another_dtype_is_tried_beside_a_quantized_winner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "has_bfloat16", lambda: True)
    found = space.refinements(Candidate(backend="inductor", quant="nf4"), PLAN, Budgets(), generates=False)
    assert found == [Candidate(backend="inductor", dtype="bfloat16")]


@pytest.mark.openvino
@pytest.mark.parametrize("units", [True, False])
def test_the_best_backend_is_tried_in_its_fast_dtypes(units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(hardware, "has_bfloat16", lambda: units)
    best = Candidate(backend="openvino")
    found = space.refinements(best, PLAN, Budgets(), generates=False)
    assert found == ([Candidate(backend="openvino", dtype="bfloat16")] if units else [])
