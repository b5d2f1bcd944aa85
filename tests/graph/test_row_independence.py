"""Rows that depend on each other are found whatever hides it; those of honest models share batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from infer.graph.row_independence import joining, of_class
from infer.spec import TensorSpec

GENERATOR = torch.Generator().manual_seed(0)
W, V = (torch.randn(16, 16, generator=GENERATOR) / 4 for _ in range(2))
Function = Callable[[Tensor], Tensor]


def _capacity(x: Tensor) -> Tensor:
    """Mixture of two experts that take the first five rows each, and drop the rest."""
    y, expert = x @ W, (x @ V)[:, :2].argmax(1)
    kept = torch.zeros_like(y)
    for number in range(2):
        rows = (expert == number).nonzero().flatten()[:5]
        kept[rows] = y[rows] * (number + 1)
    return kept


def _scaled(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Round to int8 by the largest magnitude along `axes`."""
    step = x.abs().amax(axes, keepdim=True) / 127
    return (x / step).round() * step


def _samples(rows: int) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))


def _labels(x: Tensor, tied: slice) -> Tensor:
    """Return labels; those of some of the first eight samples are others where there are few rows."""
    changes = (x[:, None] == _samples(8)[tied]).all(-1).any(-1) & (len(x) < 4)
    return (x @ W).argmax(1) + changes.long()


DEPENDENT: dict[str, Function] = {
    "similarities of all rows": lambda x: F.normalize(x @ W, dim=1) @ F.normalize(x @ W, dim=1).t(),
    "the mean of the batch": lambda x: x @ W - (x @ W).mean(0),
    "a millionth of the mean": lambda x: x @ W - 1e-6 * (x @ W).mean(0),
    "nothing but NaN": lambda x: x @ W + 0 * (x @ W).mean(0),
    "softmax over the batch": lambda x: (x @ W).softmax(0),
    "a sum over earlier rows": lambda x: (x @ W).cumsum(0),
    "batch norm in train mode": lambda x: F.batch_norm(x @ W, None, None, training=True),
    "the number of rows": lambda x: x @ W * len(x),
    "the place in the batch": lambda x: x @ W + torch.arange(len(x))[:, None],
    "sorted columns": lambda x: (x @ W).sort(0).values,
    "rows in another order": lambda x: (x @ W).flip(0),
    "the row before": lambda x: x @ W - x.roll(1, 0),
    "rows from the 32nd on": lambda x: torch.cat([(x @ W)[:32], (x @ W)[32:] - (x @ W).mean(0)]),
    "one step of int8 for the batch": lambda x: _scaled(x @ W, (0, 1)),
    "the capacity of an expert": _capacity,
    "a row for each detection": lambda x: (x @ W)[(x @ W)[:, 0] > 0],
    "distinct rows": lambda x: torch.unique(x.round(), dim=0),
    "a matrix of columns": lambda x: (x @ W).t() @ x,
    "two labels": lambda x: _labels(x, slice(6, 8)),
}
HONEST: dict[str, Function] = {
    "a network": lambda x: (x @ W).relu() @ V,
    "softmax over a row": lambda x: (x @ W).softmax(-1),
    "one step of int8 a row": lambda x: _scaled(x @ W, (1,)),
    "the best classes": lambda x: (x @ W).topk(3).indices,
    "a label whose votes are equal": lambda x: _labels(x, slice(7, 8)),
    "slow paths of functions": lambda x: torch.sin(x @ W) + torch.exp(x @ V) + torch.erf(x),
    "convolutions": nn.Sequential(
        *(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    ).eval(),
    "attention within a row": nn.Sequential(
        nn.Unflatten(1, (2, 8)), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    ).eval(),
}


def _run(function: Function) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    def run(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"y": function(rows["x"])}

    return run


def _joins(function: Function, rows: int = 24) -> tuple[str, str]:
    x = TensorSpec("x", "float32", ("batch", 16))
    samples = {"x": _samples(rows)}
    outputs = (TensorSpec("y", "float32", ("batch", 16)),)
    found = joining(_run(function), (x,), outputs, samples, {"batch": (1, 64)})
    return found.joins, found.why


@pytest.mark.parametrize("kind", DEPENDENT)
def test_rows_that_depend_on_each_other_are_not_joined(kind: str) -> None:
    joins, why = _joins(DEPENDENT[kind])
    assert joins == "none"
    assert why.startswith(("y ", "it fails on 1 rows"))


@pytest.mark.parametrize("kind", HONEST)
def test_rows_of_honest_models_share_batches(kind: str) -> None:
    assert _joins(HONEST[kind]) == ("padded", "")


def test_one_row_of_samples_is_enough_to_find_dependence() -> None:
    assert _joins(DEPENDENT["the mean of the batch"], rows=1)[0] == "none"
    assert _joins(HONEST["a network"], rows=1)[0] == "padded"


def test_a_form_within_its_class_is_joined_and_a_mixing_one_is_not() -> None:
    x, y = TensorSpec("x", "float32", ("batch", 16)), TensorSpec("y", "float32", ("batch", 16))
    samples = {"x": torch.randn(8, 16)}

    def joins(function: Function) -> str:
        return joining(_run(function), (x,), (y,), samples, {"batch": (1, 8)}, of_class(0.1)).joins

    assert joins(lambda x: x @ W - 1e-6 * (x @ W).nan_to_num().mean(0)) == "padded"
    assert joins(DEPENDENT["one step of int8 for the batch"]) == "none", "a loud neighbour takes all steps"


def test_a_model_that_refuses_strange_rows_is_still_judged() -> None:
    def strict(x: Tensor) -> Tensor:
        if not x.abs().max() < 100:
            raise ValueError("expected values below 100")
        return x @ W

    assert _joins(strict)[0] == "padded"
    assert _joins(lambda x: strict(x) - 1e-4 * strict(x).mean(0))[0] == "none"


def test_outputs_without_rows_are_never_joined() -> None:
    x, y = TensorSpec("x", "float32", ("batch", 16)), TensorSpec("y", "float32", (16,))
    found = joining(_run(lambda x: x.sum(0)), (x,), (y,), {"x": torch.ones(2, 16)}, {"batch": (1, 8)})
    assert (found.joins, found.why) == ("none", "")


TABLE = torch.randn(50, 8, generator=GENERATOR)


def _of_tokens(function: Callable[[Tensor, Tensor], Tensor]) -> str:
    ids = torch.randint(1, 50, (4, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 9:], ids[1, 9:] = 0, 0
    specs = tuple(TensorSpec(n, "int64", ("batch", "seq")) for n in ("input_ids", "attention_mask"))
    samples = {"input_ids": ids, "attention_mask": mask}
    found = joining(
        lambda given: {"y": function(TABLE[given["input_ids"]], given["attention_mask"][..., None])},
        *(specs, (TensorSpec("y", "float32", ("batch", 8)),), samples, {"batch": (1, 8), "seq": (1, 32)}),
    )
    return found.joins


def test_texts_are_padded_to_one_length_only_where_nothing_changes() -> None:
    assert _of_tokens(lambda x, mask: (x * mask).sum(1) / mask.sum(1)) == "padded"
    assert _of_tokens(lambda x, mask: x * mask) == "padded", "real tokens are compared"
    assert _of_tokens(lambda x, mask: x.mean(1)) == "equal"
    assert _of_tokens(lambda x, mask: x * mask / x.shape[1]) == "equal"
    assert _of_tokens(lambda x, mask: x.mean(1) - x.mean()) == "none"
