"""Modules whose forward lists names that are known where they are made."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from infer.named_inputs import NamedInputs


class Sum(NamedInputs):
    """Adds its inputs to a number."""

    def __init__(self, names: tuple[str, ...], number: float) -> None:
        super().__init__()
        self.number = number
        self.taking(names)

    def call(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return sum(tensors.values()) + self.number


@pytest.mark.parametrize("names", [("x",), ("ids", "mask")])
def test_the_signature_lists_the_names_of_the_inputs(names: tuple[str, ...]) -> None:
    module = Sum(names, 1.0)
    assert tuple(inspect.signature(module.forward).parameters) == names
    assert isinstance(module, Sum)
    given = {name: torch.full((2,), 2.0) for name in names}
    assert torch.equal(module(**given), module(*given.values()))
    program = torch.export.export(module, (), given)
    assert program.graph_signature.user_inputs == names


def test_a_copy_calls_itself() -> None:
    module = Sum(("x",), 1.0)
    copied = copy.deepcopy(module)
    copied.number = 5.0
    assert float(copied(torch.zeros(()))) == 5.0
    assert float(module(torch.zeros(()))) == 1.0
