"""The limits of the gate as the documentation gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer import Plan, fidelity
from infer.fidelity.thresholds import LIMITS, limits
from infer.results import Metric


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


def test_language_models_in_8_bits_are_judged_by_divergence_and_perplexity() -> None:
    """The best of many words is often a near tie, which a right model of 8 bits flips."""
    plan = Plan(source="m.gguf", quant="keep", backend="eager")
    words, classes = limits(plan, "text-generation"), limits(plan, "classification")
    assert (words.top1, words.kl, words.perplexity) == (0.92, 0.015, 0.02)
    assert (classes.top1, classes.kl) == (LIMITS["int8"].top1, LIMITS["int8"].kl)
    right = {"top1": 0.96, "kl": 0.007, "perplexity_change": 0.0014}  # groups of 64, SmolLM2-135M
    wrong = {"top1": 0.9, "kl": 0.08, "perplexity_change": 0.03}  # a head in twelve is left out
    for values, refused in ((right, False), (wrong, True)):
        found = [Metric("logits", name, value) for name, value in values.items()]
        assert bool(fidelity.judge(found, words, None)) is refused


def test_a_refusal_says_whose_the_limits_are() -> None:
    far = [Metric("y", "relative_error", 0.09)]
    ours = Plan(source="m.onnx", quant="int8", data="ours", backend="eager")
    assert "allowed for int8 on inputs of ours" in str(fidelity.judge(far, limits(ours, "tensors"), None))
    budget = limits(ours.with_(max_drop=0.05), "tensors")
    assert "allowed by --max-drop" in str(fidelity.judge(far, budget, None))
