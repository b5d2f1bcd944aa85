"""Checkpointing of repeated blocks: equal gradients, fewer activations, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infer.errors import NotUsableError
from infer.tune.memory.activation_checkpointing import (
    checkpoint_blocks,
    checkpointing,
    keep_activations,
    repeated_blocks,
)


class Block(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.wide, self.narrow, self.dropout = (
            nn.Linear(size, 4 * size),
            nn.Linear(4 * size, size),
            nn.Dropout(0.5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(torch.nn.functional.gelu(self.wide(x))))


class Layers(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Return the gradients of a seeded step, and the bytes that the forward kept for the backward."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        total = model(x).square().sum()
    return list(torch.autograd.grad(total, list(model.parameters()))), sum(kept.values())


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_bit_equal_and_activations_fewer(training: bool) -> None:
    model, x = Layers().train(training), torch.randn(50, 16)
    plain, before = gradients(model, x)
    assert checkpoint_blocks(model) == ["layers.0", "layers.1", "layers.2"]
    again, after = gradients(model, x)
    assert all(map(torch.equal, plain, again))
    assert after < before / 2
    keep_activations(model)
    assert gradients(model, x)[1] == before


def test_no_gradient_means_no_checkpoint() -> None:
    model = Layers()
    checkpoint_blocks(model)
    checkpoint_blocks(model)  # a second time changes nothing
    with torch.no_grad():
        assert model(torch.randn(2, 16)).grad_fn is None


def test_the_context_puts_the_model_back() -> None:
    model = Layers()
    for before in (False, True):
        (checkpoint_blocks if before else keep_activations)(model)
        with checkpointing(model, on=not before):
            assert ("forward" in vars(model.layers[0])) is not before
        assert ("forward" in vars(model.layers[0])) is before


def test_blocks_are_the_outermost_repeated_modules() -> None:
    stages = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layers(2), Layers(2)))
    assert list(repeated_blocks(stages)) == ["1.0", "1.1"]


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(NotUsableError, match="Linear has no repeated blocks to checkpoint"):
        checkpoint_blocks(nn.Linear(4, 4))
