"""Children that a module keeps in a plain list are those that stand in its place when it runs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from infer.load.model_patches.listed_children import with_live_lists


class Listed(nn.Module):
    """Module that runs a list of its children, as MaskFormer's pixel decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2), nn.ReLU()]
        for index, layer in enumerate(self.layers):
            self.add_module(str(index), layer)
        self.others = [nn.Linear(2, 2)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_replaced_child_is_found_in_the_list_of_its_parent() -> None:
    model = with_live_lists(nn.Sequential(Listed()))
    for one in (model, copy.deepcopy(model)):
        setattr(one[0], "0", nn.Identity())  # noqa: B010 - a child's name is a number
        x = torch.tensor([[1.0, -2.0]])
        assert torch.equal(one(x), x.relu())
        assert len(one[0].layers) == 2
        assert [type(layer) for layer in one[0].layers[1:]] == [nn.ReLU]
        assert isinstance(one[0].others, list)
