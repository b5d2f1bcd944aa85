"""A captured graph gives the numbers that the user's own module gives, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from infer.errors import NotUsableError, SourceError
from infer.graph.captured_layers import padded_at_the_end
from infer.graph.fixed_sizes import capture_at_any_sizes
from infer.graph.program import TorchGraph
from infer.spec import TensorSpec

SIZES = {"batch": (1, 64), "seq": (1, 32)}


class Net(nn.Module):
    """A linear layer whose answer `change` may alter; it is called with the module, the input and the answer."""

    def __init__(self, change: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.l, self.change = nn.Linear(16, 16), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x, self.l(x))


def captured(module: nn.Module, *inputs: str, **samples: Tensor) -> TorchGraph:
    specs = tuple(TensorSpec.parse(text) for text in inputs)
    used = {size for spec in specs for size in spec.shape if isinstance(size, str)}
    sizes = {name: bounds for name, bounds in SIZES.items() if name in used}
    return capture_at_any_sizes(module.eval(), specs, samples, sizes=sizes)


def only_output(found: TorchGraph, **inputs: Tensor) -> Tensor:
    return next(iter(found.run(inputs).values()))


def test_code_that_differs_for_one_row_is_refused_with_the_size() -> None:
    net = Net(lambda _, x, y: y if x.shape[0] > 1 else y * 2)
    with pytest.raises(
        NotUsableError, match=r"other numbers than its own code at batch 1.*x=float32\[1,16\]"
    ):
        captured(net, "x=float32[batch,16]", x=torch.randn(8, 16))


def test_the_hint_for_one_row_captures_that_row() -> None:
    net = Net(lambda _, x, y: y if x.shape[0] > 1 else y * 2)
    x = torch.randn(1, 16)
    found = captured(net, "x=float32[1,16]", x=x)
    torch.testing.assert_close(only_output(found, x=x), net(x))


def test_code_for_compilers_is_not_what_is_captured() -> None:
    net = Net(lambda _, x, y: y if torch.compiler.is_compiling() else y * 2)
    x = torch.randn(8, 16)
    torch.testing.assert_close(only_output(captured(net, "x=float32[batch,16]", x=x), x=x), net(x))
    assert not torch.compiler.is_compiling()


def test_a_path_for_one_token_is_left_out_of_the_sizes() -> None:
    net = Net(lambda _, x, y: y if x.shape[1] > 1 else -y)
    x = torch.randn(4, 5, 16)
    found = captured(net, "x=float32[batch,seq,16]", x=x)
    assert found.sizes["seq"] == (2, 32)
    assert found.fixed.startswith("narrower sizes: seq 2 to 32")
    torch.testing.assert_close(only_output(found, x=x), net(x))


def test_a_path_for_long_inputs_fixes_the_length() -> None:
    net = Net(lambda _, x, y: y if x.shape[1] < 20 else -y)
    x = torch.randn(4, 5, 16)
    found = captured(net, "x=float32[batch,seq,16]", x=x)
    assert found.sizes["seq"][1] < 20
    torch.testing.assert_close(only_output(found, x=x), net(x))


def test_squeeze_takes_no_batch_from_a_single_row() -> None:
    net = Net(lambda _, x, y: y[:, :1].squeeze())
    found = captured(net, "x=float32[batch,16]", x=torch.randn(8, 16))
    assert found.fixed == ""
    x = torch.randn(1, 16)
    torch.testing.assert_close(only_output(found, x=x).reshape(()), net(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, x, y: y + torch.randn_like(y) * 0.1, "two runs of the original on the same rows differ"),
        (lambda _, x, y: nn.functional.dropout(y, training=True), "two runs of the original"),
        (lambda _, x, y: y * torch.nan, "every value of output 0 is NaN"),
    ],
    ids=["noise", "dropout", "nan"],
)
def test_what_nothing_can_be_compared_with_is_refused(change: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        captured(Net(change), "x=float32[batch,16]", x=torch.randn(8, 16))


class Padded(nn.Module):
    """torch's encoder with a mask, as classifiers of sentences use it."""

    def __init__(self, *, norm: bool, nested: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.e = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(16) if norm else None, enable_nested_tensor=nested
        )
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return self.e(x, src_key_padding_mask=m == 0).mean(1)


@pytest.mark.parametrize(
    (
        "nested",
        "norm",
        "mask",
    ),  # torch nests where all padding is behind: a norm then sees zeros in its place
    [
        (True, False, "right"),
        (True, True, "right"),
        (True, False, "mixed"),
        (True, True, "full"),
        (False, True, "right"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_places_of_an_encoder_are_those_of_its_user(norm: bool, nested: bool, mask: str) -> None:
    net = Padded(norm=norm, nested=nested).eval()
    lengths = torch.tensor([[3], [12], [7], [5], [9], [1]])
    right = torch.arange(12)[None] < lengths
    mixed = torch.cat([right[:3], right.flip(1)[3:]])
    m = {"right": right, "mixed": mixed, "full": torch.ones_like(right)}[mask].long()
    x = torch.randn(6, 12, 16)
    found = captured(net, "x=float32[batch,12,16]", "m=int64[batch,12]", x=x, m=m)
    with torch.no_grad():
        for rows in (1, 2, 6):
            torch.testing.assert_close(
                only_output(found, x=x[:rows], m=m[:rows]), net(x[:rows], m[:rows]), rtol=1e-4, atol=1e-5
            )


def test_alignment_of_a_mask_is_what_torch_says() -> None:
    torch.manual_seed(0)
    for _ in range(200):
        keep = torch.rand(2, 4) < 0.7
        if bool(keep.any(1).all()):
            said = torch._nested_tensor_from_mask_left_aligned(torch.zeros(2, 4, 3), keep)
            assert bool(padded_at_the_end(~keep)) == said, keep
