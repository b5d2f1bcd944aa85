"""Recurrent layers over packed sequences: captured graphs against the user's own modules on rows of every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.rnn import pack_padded_sequence as packed_by_another_name
from torch.nn.utils.rnn import pad_packed_sequence as unpack

from infer.errors import NotUsableError
from infer.graph.capture import capture
from infer.graph.program import flatten
from infer.spec import TensorSpec

LENGTHS = (7, 1, 4, 2, 6, 1, 3, 5)
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn tanh": (nn.RNN, {}),
    "rnn relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm, projected": (nn.LSTM, {"proj_size": 6}),
    "lstm, no bias": (nn.LSTM, {"bias": False}),
    "lstm, dropout": (nn.LSTM, {"dropout": 0.5, "num_layers": 2}),
}


class Recurrent(nn.Module):
    """Packs, runs, unpacks; `gives` the padded outputs and lengths, the last states, or all."""

    def __init__(
        self, kind: str, gives: str = "both", *, given: bool = False, ordered: bool = False, **own: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer, options = KINDS[kind]
        self.rnn = layer(5, 12, batch_first=own.pop("batch_first", True), **{**options, **own})
        self.gives, self.given, self.ordered = gives, given, ordered

    def states(self, rows: int) -> Any:
        directions = 2 if self.rnn.bidirectional else 1
        grid = torch.linspace(-1, 1, 12).expand(self.rnn.num_layers * directions, rows, 12)
        if self.rnn.mode != "LSTM":
            return grid
        return grid[..., : self.rnn.proj_size or 12], grid * 2

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        first, steps = self.rnn.batch_first, x if self.rnn.batch_first else x.transpose(0, 1)
        packed = packed_by_another_name(steps, lengths, batch_first=first, enforce_sorted=self.ordered)
        packed = PackedSequence(packed.data * 2, *packed[1:])
        out, last = self.rnn(packed, self.states(x.shape[0])) if self.given else self.rnn(packed)
        states = last if isinstance(last, tuple) else (last,)
        if self.gives == "last":
            return tuple(state.transpose(0, 1) for state in states)
        values, sizes = unpack(out, batch_first=True, padding_value=-3.0, total_length=x.shape[1])
        return (values, sizes) if self.gives == "sequence" else (values, *(s.transpose(0, 1) for s in states))


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 7, 5, generator=generator) * 3, "lengths": torch.tensor(LENGTHS)}


def captured(module: nn.Module) -> nn.Module:
    specs = (TensorSpec.parse("x=float32[batch,7,5]"), TensorSpec.parse("lengths=int64[batch]"))
    found = capture(module.eval(), specs, rows(), sizes={"batch": (1, 8)})
    return found.program.module()


def assert_same(module: nn.Module, graph: nn.Module) -> None:
    for part in (slice(0, 8), slice(1, 2), slice(3, 7)):
        given = {name: value[part] for name, value in rows().items()}
        if getattr(module, "ordered", False):
            order = given["lengths"].argsort(descending=True)
            given = {name: value[order] for name, value in given.items()}
        with torch.no_grad():
            want, got = flatten(module(**given)), flatten(graph(**given))
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_over_packed_rows_is_captured_with_its_numbers(kind: str) -> None:
    module = Recurrent(kind)
    assert_same(module, captured(module))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lstm, projected", {"num_layers": 2, "bidirectional": True, "given": True}),
        ("gru", {"num_layers": 2, "bidirectional": True, "given": True}),
        ("rnn relu", {"batch_first": False, "given": True}),
        ("lstm", {"ordered": True, "bidirectional": True, "gives": "last"}),
    ],
    ids=str,
)
def test_directions_levels_and_given_states_are_captured(kind: str, options: dict[str, Any]) -> None:
    module = Recurrent(kind, **options)
    assert_same(module, captured(module))


def test_an_unread_cell_leaves_one_operator() -> None:
    graph = captured(Recurrent("lstm", "sequence"))
    assert sum("infer.recurrent" in str(node.target) for node in graph.graph.nodes) == 1  # type: ignore[union-attr]


class Cut(nn.Module):
    def __init__(self, total: int | None = None) -> None:
        super().__init__()
        self.rnn, self.total = nn.GRU(5, 4, batch_first=True), total

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], True, total_length=self.total)[0]


def test_unpacking_to_the_longest_row_is_refused_by_name() -> None:
    with pytest.raises(NotUsableError, match=r"pack_padded_sequence.*total_length=x\.size\(1\)"):
        captured(Cut())


def test_a_longer_total_length_pads_to_it() -> None:
    module = Cut(9)
    assert_same(module, captured(module))


class Listed(Cut):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.tolist(), True, False)
        return self.rnn(packed)[1][0]


def test_lengths_as_a_list_are_refused_by_name() -> None:
    with pytest.raises(NotUsableError, match=r"pack_padded_sequence.*\.tolist\(\)"):
        captured(Listed())


def test_packing_outside_of_a_capture_is_torchs_own() -> None:
    captured(Recurrent("gru"))
    packed = packed_by_another_name(rows()["x"], rows()["lengths"], True, False)
    assert packed.data.shape == (sum(LENGTHS), 5)
    assert nn.GRU(5, 4)(packed)[0].data.shape == (sum(LENGTHS), 4)
