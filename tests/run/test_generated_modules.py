"""A few of the generated modules that `python -m tests.fuzz.modules` runs by the thousand: right, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from infer.errors import SourceError
from infer.load.weight_loading.meta_model import build_on_meta
from tests.fuzz import modules
from tests.fuzz.modules import Case, CaseOutcome
from tests.support import generated_modules as generated

# Seed, form, backend, format, exit code.
CASES = [
    Case(6, "pickle", "eager", "none", True),  # None among the outputs
    Case(16, "exported", "eager", "int8", True),  # tied layers, each with its own bias
    Case(21, "exported", "eager", "none", True),  # the same beside attention
    Case(12, "state", "eager", "int8:weight", False),  # operators in place
    Case(57, "pickle", "eager", "int8", True),  # hooks, a bilinear layer, boolean outputs
    Case(29, "factory", "ort", "int8", True),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.seed}-{case.form}-{case.backend}-{case.quant}"
)
def test_generated_modules_are_faithful_or_refused(case: Case, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    ending = modules.run(case, tmp_path)
    assert not ending.wrong, ending
    assert ending.code in (0, *modules.REFUSALS)


def test_state_that_outlives_a_call_is_refused(tmp_path: Path) -> None:
    seed = next(s for s in range(1000) if generated.recipe(s).oddity == "stateful")
    ending = modules.run(Case(seed, "pickle", "eager", "none", True), tmp_path)
    assert (ending.code, ending.wrong) == (5, "")
    assert "requests before" in ending.said


def test_the_fuzz_table_counts_outcomes_by_kind() -> None:
    case = Case(6, "pickle", "eager", "none", True)
    lines = modules.table({case: CaseOutcome(5, "a sentence")}).splitlines()
    row = next(line for line in lines if line.startswith("conv3d"))
    assert row.split() == ["conv3d", "0", "0", "0", "0", "1", "0", "0"]


def test_a_generated_recipe_is_deterministic() -> None:
    for seed in range(8):
        one, other = generated.build(seed).state_dict(), generated.build(seed).state_dict()
        assert generated.recipe(seed) == generated.recipe(seed)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("seeded", [True, False])
def test_random_buffers_in_no_checkpoint_are_repeated_or_refused(seeded: bool) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if seeded:
                torch.manual_seed(3)
            self.layer = nn.Linear(8, 8)
            self.register_buffer("matrix", torch.randn(8, 8), persistent=False)

    if not seeded:
        with pytest.raises(SourceError, match=r"buffer 'matrix' with other random numbers at each call"):
            build_on_meta(Features, "a factory")
        return
    module, findings = build_on_meta(Features, "a factory")
    assert "random numbers may be in matrix" in findings[0].why
    torch.testing.assert_close(module.matrix, Features().matrix)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("ort could not lower this model: KeyError: 'x'. Try --backend eager.", "no sentence"),
        ("this model has no ONNX form: 'int' object has no attribute 'name'", "no sentence"),
        ("the float model itself fails on its inputs: IndexError: index out of range in self", ""),
        ("no layer of this model can be int8 (refused stem: weight has 384 values)", ""),
    ],
)
def test_a_refusal_with_a_python_error_text_is_a_failure(said: str, wrong: str) -> None:
    assert modules.refused(5, said, set()).wrong == wrong
