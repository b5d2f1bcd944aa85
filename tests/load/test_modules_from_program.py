"""Programs that were captured elsewhere get their layers back: same numbers, ties kept, ready to be quantized."""

from __future__ import annotations

import torch
from torch import nn

from infer import compress
from infer.load.sources.modules_from_program import restore_layers
from infer.plan import Plan


class Mixed(nn.Module):
    """Convolution with stride and groups, tied embedding and head, a linear without bias, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(128, 64)
        self.inner = nn.Linear(64, 64)
        self.bare = nn.Linear(64, 64, bias=False)
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.bare(self.inner(self.inner(self.words(ids))).relu())
        computed = torch.nn.functional.linear(hidden, self.bare.weight * 2)
        return self.head(computed), self.conv(image)


def program() -> tuple[nn.Module, torch.fx.GraphModule, tuple[torch.Tensor, torch.Tensor]]:
    model = Mixed().eval()
    inputs = torch.randint(0, 128, (2, 5)), torch.randn(2, 4, 9, 9)
    return model, torch.export.export(model, inputs, strict=False).module(check_guards=False), inputs


def test_layers_restored_from_a_program_give_equal_outputs() -> None:
    model, module, inputs = program()
    expected = model(*inputs)
    assert restore_layers(module) == 6
    torch.testing.assert_close(module(*inputs), expected, rtol=0, atol=0)
    kinds = sorted(
        type(m).__name__ for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Embedding)
    )
    assert kinds == ["Conv2d", "Embedding", "Linear", "Linear", "Linear", "Linear"]


def test_a_computed_weight_becomes_no_layer() -> None:
    _, module, _ = program()
    restore_layers(module)
    left = [n for n in module.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(left) == 1


def test_tied_weights_stay_one_tensor_when_quantized() -> None:
    _, module, inputs = program()
    restore_layers(module)
    found = compress.quantize_model(module, Plan(source="x", quant="nf4"))
    assert found.totals.num_layers >= 3
    codes = [
        m.packed.codes for m in module.modules() if hasattr(m, "packed") and m.packed.codes.shape[0] == 128
    ]
    assert len({c.data_ptr() for c in codes}) == 1
    assert all(torch.isfinite(out).all() for out in module(*inputs))


class Shared(nn.Module):
    """Two layers with one weight and a bias each; a bias that is also read on its own; an attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        y = torch.nn.functional.linear(y, self.third.weight) - self.third.bias
        return self.attention(y, y, y)[0]


def test_layers_with_shared_weights_or_owners_keep_their_numbers() -> None:
    model, x = Shared().eval(), torch.randn(3, 5, 16)
    program = torch.export.export(model, (x,), strict=False).module()
    with torch.no_grad():
        expected = program(x)
        assert restore_layers(program) == 5
        torch.testing.assert_close(program(x), expected)
