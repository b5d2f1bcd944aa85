"""Structure of calls: nesting and constants around tensors, put together again as they were."""

from __future__ import annotations

import collections
import dataclasses
from collections import UserDict

import pytest
import torch
from torch import nn

from infer.live.call_structure import CallReader, UnsupportedValueError, take_apart

A, B = torch.arange(3.0), torch.arange(4)


@dataclasses.dataclass(frozen=True)
class Answer:
    score: torch.Tensor
    count: int
    parts: dict[str, object]


Pair = collections.namedtuple("Pair", "left right")

VALUES = [
    (A, ("output",)),
    ((A, B), ("output_0", "output_1")),
    ([A, None, (B,)], ("output_0", "output_2_0")),
    ({"first": A, "more": {"second": B}}, ("first", "more_second")),
    (Pair(A, B), ("left", "right")),
    (Answer(A, 3, {"k": [B, 1.5]}), ("score", "parts_k_0")),
    (UserDict(ids=B, note="text"), ("ids",)),
    (collections.OrderedDict(out=A, aux=None), ("out",)),
    ({"class": A, "class_": B}, ("class_", "class__")),
]


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other
    if dataclasses.is_dataclass(one):
        return all(equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, collections.abc.Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize(("value", "names"), VALUES, ids=[str(names) for _, names in VALUES])
def test_a_value_is_put_together_again_as_it_was(value, names) -> None:
    structure, tensors = take_apart(value, "output")
    again = structure.filled(tensors)
    assert structure.names == names
    assert type(again) is type(value)
    assert equal(value, again)


def test_outputs_of_diffusers_are_put_together_again() -> None:
    output = pytest.importorskip("diffusers.models.unets.unet_2d").UNet2DOutput(sample=A)
    structure, tensors = take_apart(output, "output")
    again = structure.filled(tensors)
    assert structure.names == ("sample",)
    assert type(again) is type(output)
    assert all(value is A for value in (again.sample, again["sample"], again[0]))


def test_structures_with_other_constants_are_not_equal() -> None:
    keys = [take_apart((A, constant), "x")[0].key for constant in (1, 1.0, True, "1", None, torch.float16)]
    assert len(set(keys)) == len(keys)
    assert take_apart((A, 1), "x")[0].key == take_apart((torch.zeros(9), 1), "x")[0].key


@pytest.mark.parametrize(
    "leaf", [object(), torch.ones(2, dtype=torch.complex64), torch.ones(2, 2).to_sparse()]
)
def test_a_leaf_that_is_no_tensor_and_no_constant_is_named(leaf) -> None:
    with pytest.raises(UnsupportedValueError, match=r"argument cache\.0 is"):
        take_apart({"x": A, "cache": [leaf]}, "argument")


class Model(nn.Module):
    def forward(self, x, mask=None, *more, scale=1.0, flag=True, **others):
        return x, mask, more, scale, flag, others


CALLS = [
    ((A,), {}),
    ((A,), {"mask": B}),
    ((), {"x": A}),
    ((A, None), {"scale": 1.0}),
    ((A, B, A, B), {"scale": 2.0}),
    ((A, None, B), {"flag": False, "residual": A}),
]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_a_call_reaches_the_model_as_its_user_made_it(args, kwargs) -> None:
    model = Model()
    reader = CallReader(model)
    structure, tensors = reader.read(args, kwargs)
    positional, named = reader.arguments(structure, tensors)
    assert equal(model(*positional, **named), model(*args, **kwargs))


def test_a_default_that_is_given_makes_no_other_structure() -> None:
    reader = CallReader(Model())
    plain = reader.read((A,), {})[0].key
    assert reader.read((A, None), {"scale": 1.0, "flag": True})[0].key == plain
    assert reader.read((A,), {"scale": 1})[0].key != plain
