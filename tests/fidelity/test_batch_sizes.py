"""Models are also compared in small batches and the largest; NaN of the float model is said, of one side refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends import eager, ort
from infer import Plan, Predictor, fidelity, optimize
from infer.errors import GateError
from infer.fidelity.batch_sizes import compare_size
from infer.fidelity.thresholds import LIMITS
from infer.results import Metric
from infer.run.stages import Outcome

pytestmark = pytest.mark.filterwarnings("ignore:(var|std)")
RECIPE = """
import torch

class Statistics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 5)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        out = {"y": self.last(h), "variance": h.var(0), "deviation": h.std(0), "spread": h.var()}
        return {**out, "centred": h - h.mean(0), "count": (h > 0).sum(0)}

def build():
    torch.manual_seed(0)
    return Statistics()

def example_inputs():
    torch.manual_seed(1)
    return {"x": torch.randn(16, 16)}
"""
Outputs = Mapping[str, Tensor]


def made(folder: Path, backend: str) -> Outcome:
    recipe = folder / "statistics_recipe.py"
    recipe.write_text(RECIPE)
    space: dict[str, Callable[[], torch.nn.Module]] = {}
    exec(RECIPE, space)  # noqa: S102 - the text above
    torch.save(space["build"]().state_dict(), folder / "model.pt")
    plan = Plan(
        source=str(folder / "model.pt"),
        model=f"{recipe}:build",
        data=f"{recipe}:example_inputs",
        inputs=("x=float32[batch,16]",),
        backend=backend,
        batches=(),
    )
    return optimize(plan, folder / "model.infer")


@pytest.mark.parametrize("backend", ["eager", "ort"])
def test_nan_of_the_float_model_at_batch_one_is_reported(backend: str, tmp_path: Path) -> None:
    if backend == "ort" and (reason := ort.missing()):
        pytest.skip(reason)
    outcome = made(tmp_path, backend)
    found = {f.what: f for f in outcome.manifest.findings if f.stage == "compare"}
    said = {what for what in found if what.endswith("float_non_finite")}
    assert said == {f"{name} at batch 1.float_non_finite" for name in ("variance", "deviation")}
    assert "in the float model itself" in found["variance at batch 1.float_non_finite"].why
    for size in (1, 3):
        assert found[f"batch {size}.relative_error"].value < 1e-5
        assert found[f"count at batch {size}.exact"].value == 1.0
    with Predictor.load(outcome.path) as predictor:
        one = predictor.predict({"x": torch.zeros(1, 16).numpy()})
    assert {name for name, value in one.items() if (value != value).any()} == {"variance", "deviation"}


def wrong_at(size: int, change: Callable[[Outputs], Outputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what the optimized model gives at a batch size."""
    run = eager.Runner.run

    def wrong(self: eager.Runner, inputs: Mapping[str, Tensor]) -> Outputs:
        outputs = run(self, inputs)
        return change(outputs) if len(inputs["x"]) == size else outputs

    monkeypatch.setattr(eager.Runner, "run", wrong)


def failing(outputs: Outputs) -> Outputs:
    raise IndexError("index 3 is out of range")


@pytest.mark.parametrize(
    ("size", "change", "words"),
    [
        (1, lambda o: {**o, "y": o["y"] * torch.nan}, "y at batch 1 has 40 values that are NaN or infinite"),
        (1, lambda o: {**o, "variance": torch.zeros(16)}, "variance at batch 1 has 128 values that are NaN in"),
        (3, lambda o: {**o, "y": o["y"].flip(0)}, "y at batch 3.*is allowed"),
        (3, lambda o: {**o, "y": o["y"][:2]}, "y at batch 3 has the wrong shape"),
        (1, failing, "the optimized model fails at batch 1, unlike the float model: index 3"),
    ],
)  # fmt: skip
def test_a_batch_size_at_which_it_differs_is_refused(
    size: int,
    change: Callable[[Outputs], Outputs],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_at(size, change, monkeypatch)
    with pytest.raises(GateError, match=words):
        made(tmp_path, "eager")
    assert not (tmp_path / "model.infer").exists()


def compared(reference: Callable[[Outputs], Outputs], run: Callable[[Outputs], Outputs]) -> list[Metric]:
    return compare_size("batch 1", [{"x": torch.ones(1, 4)}], reference, run, "tensors", {"y": 1.0})


def test_a_batch_size_that_fails_in_float_is_reported_not_judged() -> None:
    found = compared(lambda _: failing({}), lambda _: {"y": torch.ones(1, 4)})
    assert [(m.label, m.value) for m in found] == [("batch 1.compared", None)]
    assert "the float model itself fails there: index 3" in found[0].detail
    assert fidelity.judge(found, LIMITS["float32"], None) is None


def test_rounding_of_outputs_that_are_zero_is_no_error() -> None:
    found = compared(lambda _: {"y": torch.zeros(1, 4)}, lambda _: {"y": torch.full((1, 4), 1e-7)})
    assert fidelity.judge(found, LIMITS["float32"], None) is None
    found = compared(lambda _: {"y": torch.zeros(1, 4)}, lambda _: {"y": torch.full((1, 4), 0.1)})
    assert "batch 1.relative_error 0.1 is above" in str(fidelity.judge(found, LIMITS["float32"], None))


@pytest.mark.parametrize(
    ("reference", "got", "words"),
    [
        (torch.nan, torch.nan, None),
        (torch.inf, torch.inf, None),
        (1.0, torch.nan, "1 values that are NaN or infinite, unlike the float model's"),
        (torch.nan, 1.0, "1 values that are NaN in the float model and numbers"),
        (torch.nan, torch.inf, "1 values that are NaN in the float model and numbers"),
        (torch.inf, 1.0, "1 values that are NaN or infinite, unlike the float model's"),
    ],
)
def test_nan_is_refused_unless_the_float_model_has_it_too(
    reference: float, got: float, words: str | None
) -> None:
    pair = [{"y": torch.tensor([[value, 1.0, 2.0]])} for value in (reference, got)]
    found = fidelity.compare(pair[0], pair[1], task="tensors")
    reason = fidelity.judge(found, LIMITS["float32"], None)
    assert (reason is None) if words is None else (words in str(reason))
    said = [m for m in found if m.name == "float_non_finite"]
    assert [f.value for f in said] == ([] if reference == 1.0 else [1])
