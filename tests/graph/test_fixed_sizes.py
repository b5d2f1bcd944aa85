"""Models that can't be captured with symbolic sizes: captured with fixed ones, or refused with the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infer.errors import NotUsableError, SourceError
from infer.graph import capture
from infer.graph.fixed_sizes import capture_at_any_sizes, with_named_rows
from infer.graph.program import TorchGraph
from infer.spec import TensorSpec
from tests.support import generated_modules


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))


class RowByRow(Base):
    """Rows are independent, and its code makes a constant of their number."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        rows = [self.fc(x[i]) for i in range(int(x.shape[0]))]
        return {"y": torch.stack(rows), "total": torch.stack(rows).sum(-1)}


class Pairs(Base):
    """Rows are added to their neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.fc(x[i]) for i in range(int(x.shape[0]))]
        return torch.stack(rows) + rows[-1]


class ByFour(Base):
    """Rows are independent, and other numbers come of some counts of them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 if x.shape[0] % 4 else 3)


class Above(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.shape[0] <= 20 else -self.fc(x)


class InAnotherLayout(Base):
    """Asks for the count of rows, which changes no number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.clone() if x.shape[0] >= 48 else x)


class Table(Base):
    """Takes sequences of 5 only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.arange(5.0)[:, None]


class Both(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(x[i]) + torch.arange(5.0)[:, None] for i in range(int(x.shape[0]))])


class Double(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Branch(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y if y.sum() > 0 else -y


def captured(module: nn.Module, spec: str, x: Tensor, **sizes: Any) -> TorchGraph:
    specs = (TensorSpec.parse(spec),)
    bounds = {"batch": (1, 64), "seq": (1, 64)} | sizes
    return capture_at_any_sizes(module.eval(), specs, {"x": x}, sizes=bounds)


def test_independent_rows_are_captured_one_by_one_and_named() -> None:
    module = RowByRow()
    found = captured(module, "x=float32[batch,8]", torch.randn(6, 8))
    assert found.fixed == (
        "fixed sizes: batch 1 (the model's code makes a constant of batch; rows run one by one)"
    )
    assert found.sizes["batch"] == (1, 1)
    assert [spec.format() for spec in found.outputs] == ["y=float32[batch,4]", "total=float32[batch]"]
    x = torch.randn(1, 8)
    torch.testing.assert_close(found.run({"x": x})["y"], module(x)["y"])
    assert module.calls == 1  # of the line above: what was tried before left no trace


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_rows_that_depend_on_each_other_become_one_row_a_request(rows: int) -> None:
    found = captured(Pairs(), "x=float32[batch,8]", torch.randn(rows, 8))
    assert found.fixed.endswith("it takes one row a request)")
    assert [spec.format() for spec in found.inputs] == ["x=float32[1,8]"]
    assert found.outputs[0].shape == (1, 4)
    assert "batch" not in found.sizes
    assert found.samples["x"].shape == (1, 8)


@pytest.mark.parametrize("model", [ByFour, Above])
def test_a_model_that_asks_how_many_rows_there_are_gets_one_a_request(model: type[Base]) -> None:
    found = captured(model(), "x=float32[batch,8]", torch.randn(6, 8))
    assert found.fixed.endswith("it takes one row a request)")
    assert found.inputs[0].shape == (1, 8)


def test_a_count_of_rows_that_changes_no_number_bounds_the_batch() -> None:
    found = captured(InAnotherLayout(), "x=float32[batch,8]", torch.randn(6, 8))
    assert found.fixed.startswith("narrower sizes: batch 1 to 47 ")
    for rows in (1, 7, 47):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(next(iter(found.run({"x": x}).values())), InAnotherLayout()(x))


def test_a_length_is_fixed_as_in_the_samples_and_the_batch_stays_free() -> None:
    found = captured(Table(), "x=float32[batch,seq,8]", torch.randn(4, 5, 8))
    assert found.sizes == {"batch": (1, 64), "seq": (5, 5)}
    assert found.fixed.startswith("fixed sizes: seq 5 (")
    x = torch.randn(7, 5, 8)
    torch.testing.assert_close(next(iter(found.run({"x": x}).values())), Table()(x))


class Neighbours(Base):
    def forward(self, x: Tensor) -> Tensor:
        steps = x[:, 1:] - x[:, :-1]
        return steps[:, 1:] - steps[:, :-1]


def test_a_length_is_narrowed_to_what_the_code_takes() -> None:
    found = captured(Neighbours(), "x=float32[batch,seq,8]", torch.randn(4, 5, 8))
    low, high = found.sizes["seq"]
    assert (low, high) == (4, 64)
    assert found.fixed == "narrower sizes: seq 4 to 64 (the model's code takes no others)"
    for length in (low, 40):
        x = torch.randn(3, length, 8)
        torch.testing.assert_close(next(iter(found.run({"x": x}).values())), Neighbours()(x))


class Line(Base):
    """A text line whose height of 8 to 15 is pooled away; its width is free."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(x, (8, 2))
        if y.shape[2] != 1:
            raise ValueError("expected one row")
        return y.flatten(2)


def test_a_length_that_is_pooled_away_keeps_its_range_and_the_others_free() -> None:
    found = captured(Line(), "x=float32[batch,3,height,width]", torch.randn(4, 3, 9, 20))
    assert found.sizes["height"] == (8, 15)
    low, high = found.sizes["width"]
    assert low <= 6
    assert high >= 64
    assert "height 8 to 15" in found.fixed
    for height, width in ((8, 20), (15, 64), (12, low)):
        x = torch.randn(3, 3, height, width)
        torch.testing.assert_close(next(iter(found.run({"x": x}).values())), Line()(x))


def test_batch_and_length_are_both_fixed_where_needed() -> None:
    found = captured(Both(), "x=float32[batch,seq,8]", torch.randn(4, 5, 8))
    assert found.sizes == {"batch": (1, 1), "seq": (5, 5)}
    assert [spec.shape[0] for spec in found.outputs] == ["batch"]


def test_a_largest_batch_of_one_is_captured_with_one_row() -> None:
    specs = (TensorSpec.parse("input=float32[batch,8]"),)
    found = capture_at_any_sizes(
        nn.Linear(8, 4).eval(), specs, {"input": torch.randn(4, 8)}, sizes={"batch": (1, 1)}
    )
    assert found.fixed == ""
    assert found.outputs[0].shape == ("batch", 4)
    assert found.run({"input": torch.ones(1, 8)})["output"].shape == (1, 4)
    assert with_named_rows(found) == found


def test_a_model_with_symbolic_sizes_gets_no_fixed_size() -> None:
    specs = (TensorSpec.parse("input=float32[batch,8]"),)
    found = capture_at_any_sizes(
        nn.Linear(8, 4).eval(), specs, {"input": torch.randn(4, 8)}, sizes={"batch": (1, 64)}
    )
    assert (found.fixed, found.sizes) == ("", {"batch": (1, 64)})


def test_a_branch_on_a_value_is_refused_with_its_line() -> None:
    line = r"asks for the value of a tensor at test_fixed_sizes.py:\d+: return y if y.sum\(\) > 0 else -y.*torch.where"
    with pytest.raises(NotUsableError, match=line):
        captured(Branch(), "x=float32[batch,8]", torch.randn(4, 8))


def test_a_model_that_raises_is_reported_as_its_own_error() -> None:
    with pytest.raises(SourceError, match=r"the float model itself fails on its inputs.*\(8\) must match"):
        captured(Table(), "x=float32[batch,seq,8]", torch.randn(4, 8, 8))


def test_the_hint_proposes_the_input_with_the_size_that_is_constant() -> None:
    specs = (TensorSpec.parse("x=float32[batch,seq,8]"),)
    with pytest.raises(NotUsableError) as caught:
        capture.capture(RowByRow().eval(), specs, {"x": torch.randn(4, 5, 8)})
    assert "its code makes a constant of batch" in str(caught.value)
    assert str(caught.value.hint).endswith("as a number: --input x=float32[1,seq,8]")


def test_ids_of_generated_modules_stay_within_their_table() -> None:
    for seed in (40116, 40169, 40199):
        recipe, model = generated_modules.recipe(seed), generated_modules.build(seed)
        with torch.no_grad():
            model(**generated_modules.rows(recipe, 24, seed + 1))


def test_the_line_of_the_model_is_the_last_one_outside_libraries() -> None:
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 2)(torch.ones(3))
    assert capture.line_of_model(caught.value).startswith("test_fixed_sizes.py:")
    assert capture.line_of_model(None) == ""
