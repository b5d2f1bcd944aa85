"""Calls of a module from tensors, dicts, loaders, datasets and generators."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from infer.errors import UsageError
from infer.live.given_calls import MOST_CALLS, given_calls


class TwoInputs(nn.Module):
    def forward(self, x, mask=None, labels=None):
        y = x * 2 if mask is None else x * mask
        return y if labels is None else (y, (y - labels).square().mean())


class OneInput(nn.Module):
    def forward(self, x):
        return x.float() @ torch.ones(3, 1)


class OneDict(nn.Module):
    def forward(self, batch):
        return batch["user"] + batch["item"]


class Rows(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.full((3,), float(index)), index % 2


X, Y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])


def shapes(calls):
    return [[tuple(value.shape) for value in call.args] for call in calls]


def test_a_tensor_or_an_array_is_one_call() -> None:
    assert shapes(given_calls(OneInput(), X, None)) == [[(6, 3)]]
    (call,) = given_calls(OneInput(), X.numpy(), None)
    assert torch.equal(call.args[0], X)


def test_a_tuple_is_the_positional_arguments_of_one_call() -> None:
    assert shapes(given_calls(TwoInputs(), (X, X), None)) == [[(6, 3), (6, 3)]]


def test_a_dict_is_the_named_arguments_without_labels() -> None:
    (call,) = given_calls(TwoInputs(), {"x": X, "mask": X, "labels": X, "text": "a cat"}, None)
    assert not call.args
    assert sorted(call.kwargs) == ["mask", "x"]


def test_a_dict_is_the_one_argument_of_a_model_that_takes_a_dict() -> None:
    (call,) = given_calls(OneDict(), {"user": X, "item": X}, None)
    assert sorted(call.args[0]) == ["item", "user"]


LOADERS = {
    "loader": DataLoader(TensorDataset(X, Y), batch_size=2),
    "dataset": Rows(),
    "list": [(X, Y), (X, Y)],
    "generator": ((X, Y) for _ in range(3)),
}


@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
def test_labels_of_a_row_are_left_out_where_the_call_fails_with_them(data) -> None:
    calls = given_calls(OneInput(), data, None)
    assert len(calls) > 1
    assert all(len(call.args) == 1 and call.args[0].shape[-1] == 3 for call in calls)


def test_select_takes_from_a_row_what_the_model_takes() -> None:
    loader = DataLoader(TensorDataset(Y, X), batch_size=3)
    calls = given_calls(OneInput(), loader, lambda row: row[1])
    assert shapes(calls) == [[(3, 3)], [(3, 3)]]


def test_an_endless_generator_is_read_for_a_bounded_number_of_calls() -> None:
    def endless():
        while True:
            yield X

    assert len(given_calls(OneInput(), endless(), None)) == MOST_CALLS


WRONG = [
    (torch.randn(2, 7), "the model does not take the data: .*mat1 and mat2"),
    ([], "the data has no row"),
    (3, "expected tensors, a dict or a loader of them, got int"),
    ("model.npz", "expected tensors, a dict or a loader of them, got str"),
]


@pytest.mark.parametrize(("data", "reason"), WRONG)
def test_data_that_the_model_does_not_take_is_refused_with_the_reason(data, reason) -> None:
    with pytest.raises(UsageError, match=reason):
        given_calls(OneInput(), data, None)


def test_an_exception_of_the_data_itself_is_told_as_such() -> None:
    def broken():
        yield X
        raise OSError("disk gone")

    with pytest.raises(UsageError, match="the data raised .*disk gone"):
        given_calls(OneInput(), broken(), None)


def test_a_numpy_dict_becomes_tensors() -> None:
    (call,) = given_calls(TwoInputs(), {"x": np.ones((2, 3), np.float32)}, None)
    assert call.kwargs["x"].dtype is torch.float32


class WritingIntoDicts(nn.Module):
    def forward(self, features):
        features["embedding"] = features["x"] * 2
        return features


def test_what_a_module_writes_into_its_dict_is_no_argument_of_the_call() -> None:
    rows = [({"x": X},), (UserDict(x=X),)]
    for row in rows:
        (call,) = given_calls(WritingIntoDicts(), [row], None)
        assert list(call.args[0]) == ["x"]
