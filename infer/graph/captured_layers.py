"""Layers of torch that take another form while a model is captured than where its users call it.

Recurrent ones are one operator for any number of steps, over padded sequences with a mask: torch's operators would fix
the number of steps to that of the sample, `infer::recurrent` stands in their place.

A packed sequence lists the rows that are left at each step, so its sizes depend on values. While a model is captured,
packing keeps the padded values [time, batch, features] and puts the mask of valid steps [time, batch] in the place of
`batch_sizes`. Padding stands behind the valid steps of a row, so it never reaches them: the reverse direction runs over
each row turned around within its length, the last state is read at the row's last valid step, and an LSTM's cell is
held behind it by gates that are forced open and shut.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

from .. import kernels  # noqa: F401 - registers the operator
from ..errors import NotUsableError

NAME = "pack_padded_sequence"
FORCED = 1e4  # sigmoid(±FORCED) is 1 and 0 in every float dtype
_FUNCTIONS = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}  # of `torch._VF`


class _Uses:
    """Uses of packed sequences while one model is captured."""

    packed = False
    cut = False  # unpacked to the length of the longest row, which is a value


_uses = _Uses()


@contextlib.contextmanager
def recurrent() -> Iterator[None]:
    """Let recurrent layers run as one operator, over padded sequences with a mask where the model packs them.

    Raises `NotUsableError` where the model unpacks them to the length of the longest row.
    """
    global _uses
    _uses = _Uses()
    # A file that imported the functions by name holds the functions themselves: their code is replaced, not their name.
    functions = {rnn.pack_padded_sequence: _pack_code, rnn.pad_packed_sequence: _unpack_code}
    codes = {function: function.__code__ for function in functions}
    layers = {kind: kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN)}
    usual = {name: getattr(torch._VF, name) for name in _FUNCTIONS.values()}
    try:
        for mode, name in _FUNCTIONS.items():
            setattr(torch._VF, name, partial(_operator, mode, usual[name]))
        for function, ours in functions.items():
            function.__code__ = ours.__code__
        for kind, forward in layers.items():
            kind.forward = _forward(forward)  # type: ignore[method-assign]
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code
        for kind, forward in layers.items():
            kind.forward = forward  # type: ignore[method-assign]
        for name, function in usual.items():
            setattr(torch._VF, name, function)
    if _uses.cut:
        raise NotUsableError(
            "the model can't be captured: pad_packed_sequence without total_length gives the length of the longest "
            f"row that {NAME} was given, and a graph has no sizes that depend on values",
            hint="Give it the length of the padded input: pad_packed_sequence(…, total_length=x.size(1))",
        )


def uses_packing() -> bool:
    """Tell if the model that was captured last packs sequences."""
    return _uses.packed


def drop_unread(graph: fx.Graph) -> None:
    """Remove operators without a reader, in place: cells of an LSTM that the model does not return."""
    for node in reversed(graph.nodes):
        target = node.target
        is_operator = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "infer")
        is_pure = target is operator.getitem or (is_operator and not target._schema.is_mutable)  # type: ignore[union-attr]
        if is_pure and not node.users:
            graph.erase_node(node)


def _pack_code(
    input: Tensor,  # noqa: A002 - torch's name
    lengths: Any,
    batch_first: bool = False,
    enforce_sorted: bool = True,
) -> PackedSequence:
    """Stand in the place of torch's own code, whose globals it runs with."""
    from infer.graph import captured_layers

    return captured_layers.pack(input, lengths, batch_first)


def _unpack_code(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Stand in the place of torch's own code, whose globals it runs with."""
    from infer.graph import captured_layers

    return captured_layers.unpack(sequence, batch_first, padding_value, total_length)


def pack(value: Tensor, lengths: Any, batch_first: bool) -> PackedSequence:
    """Return the values [time, batch, …] with their mask [time, batch]; rows keep their order."""
    _uses.packed = True
    if not isinstance(lengths, Tensor) and not all(type(length) is int for length in lengths):
        raise NotUsableError(
            f"the model can't be captured: {NAME} is given a list of values of a tensor, and a graph has none",
            hint="Give it the lengths as a tensor, without .tolist()",
        )
    steps = value.transpose(0, 1) if batch_first else value
    limits = torch.as_tensor(lengths, dtype=torch.int64, device=value.device)
    return PackedSequence(steps, torch.arange(steps.shape[0], device=value.device)[:, None] < limits)


def unpack(
    sequence: PackedSequence, batch_first: bool, padding_value: float, total_length: int | None
) -> tuple[Tensor, Tensor]:
    """Return the values with `padding_value` behind each row's length, and the lengths."""
    if total_length is None:
        _uses.cut = True
    steps, valid = sequence.data, sequence.batch_sizes
    mask = valid.reshape(*valid.shape, *[1] * (steps.dim() - 2))
    out = torch.where(mask, steps, torch.as_tensor(padding_value, dtype=steps.dtype, device=steps.device))
    if total_length is not None and total_length != steps.shape[0]:
        if total_length < steps.shape[0]:
            raise NotUsableError(
                f"the model can't be captured: total_length={total_length} of pad_packed_sequence is less than the "
                f"{steps.shape[0]} steps that {NAME} was given",
                hint="Give it the length of the padded input: total_length=x.size(1)",
            )
        behind = [0, 0] * (steps.dim() - 1)
        out = F.pad(out, [*behind, 0, total_length - steps.shape[0]], value=padding_value)
    return (out.transpose(0, 1) if batch_first else out), valid.sum(0)


def _operator(mode: str, usual: Callable[..., Any], *arguments: Any) -> Any:
    """Stand in the place of a function of `torch._VF`, whose arguments it takes."""
    is_padded = len(arguments) == 9 and isinstance(arguments[3], bool)
    if not is_padded:  # a packed sequence that the model made by itself
        return usual(*arguments)
    x, states, weights, has_biases, layers, dropout, training, bidirectional, batch_first = arguments
    if training and dropout:
        return usual(*arguments)
    states = [states] if isinstance(states, Tensor) else list(states)
    out, hidden, cell = torch.ops.infer.recurrent(
        x, states, list(weights), mode, has_biases, layers, bidirectional, batch_first
    )
    return (out, hidden, cell) if mode == "LSTM" else (out, hidden)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:  # noqa: A002 - torch's name
        return _run(self, input, hx) if isinstance(input, PackedSequence) else original(self, input, hx)

    return forward


def _run(layer: nn.RNNBase, sequence: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
    """Compute a recurrent layer over padded values, one level and direction after the other."""
    steps, valid = sequence.data, sequence.batch_sizes
    is_lstm, directions = layer.mode == "LSTM", 2 if layer.bidirectional else 1
    weights, first = layer._flat_weights, hx if is_lstm or hx is None else (hx,)
    if first is None:
        widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)[: 2 if is_lstm else 1]
        levels = layer.num_layers * directions
        first = tuple(steps.new_zeros(levels, steps.shape[1], width) for width in widths)
    count = len(weights) // (layer.num_layers * directions)
    last = (valid.sum(0) - 1).clamp_min(0)[None, :, None]
    ends: list[list[Tensor]] = [[] for _ in first]
    for level in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            index = level * directions + direction
            layer_weights = list(weights[index * count : (index + 1) * count])
            states = tuple(state[index : index + 1].contiguous() for state in first)
            inward = _turned(steps, valid) if direction else steps
            out = _call(layer, inward, states, layer_weights)[0]
            ends[0].append(out.gather(0, last.expand(1, -1, out.shape[2])))
            if is_lstm:
                ends[1].append(_last_cell(layer, inward, valid, states, layer_weights))
            outputs.append(_turned(out, valid) if direction else out)
        steps = torch.cat(outputs, -1) if directions > 1 else outputs[0]
    final = tuple(torch.cat(each) for each in ends)
    return PackedSequence(steps, valid), final if is_lstm else final[0]


def _call(layer: nn.RNNBase, steps: Tensor, states: tuple[Tensor, ...], weights: list[Any]) -> Any:
    """Run one level in one direction by torch's operator: [time, batch, features] → output, last state, last cell."""
    hidden = states if layer.mode == "LSTM" else states[0]
    function = getattr(torch._VF, _FUNCTIONS[layer.mode])
    return function(steps, hidden, weights, layer.bias, 1, 0.0, False, False, False)


def _last_cell(
    layer: nn.RNNBase, steps: Tensor, valid: Tensor, states: tuple[Tensor, ...], weights: list[Any]
) -> Tensor:
    """Return an LSTM's cell at each row's last valid step: behind it, forget gates are 1 and input gates 0.

    The gates are forced by one more input, which is 1 at padded steps. Where nothing reads the cell, nothing is left of
    this in the graph.
    """
    shut = steps.new_full((layer.hidden_size, 1), -FORCED)
    free = steps.new_zeros((2 * layer.hidden_size, 1))
    wider = torch.cat([weights[0], torch.cat([shut, -shut, free])], 1)
    kept = torch.where(valid[:, :, None], steps, torch.zeros((), dtype=steps.dtype, device=steps.device))
    flag = (~valid)[:, :, None].to(steps.dtype)
    return _call(layer, torch.cat([kept, flag], -1), states, [wider, *weights[1:]])[2]


def _turned(steps: Tensor, valid: Tensor) -> Tensor:
    """Turn each row around within its length; what stands behind it stays. Twice is once."""
    at = torch.arange(steps.shape[0], device=steps.device)[:, None]
    index = torch.where(valid, valid.sum(0) - 1 - at, at)
    return steps.gather(0, index[:, :, None].expand(-1, -1, steps.shape[2]))


@contextlib.contextmanager
def padded_encoders() -> Iterator[None]:
    """Let `nn.TransformerEncoder` give zeros at padded places, as it does where its users call it without gradients.

    There it packs the tokens of a padded batch; while it is exported it computes the padded ones.
    """
    original = nn.TransformerEncoder.forward

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        packs = (
            torch.backends.mha.get_fastpath_enabled()
            and getattr(self, "use_nested_tensor", False)
            and not self.training
            and src.dim() == 3
            and mask is None
        )
        if not packs or src_key_padding_mask is None:
            return original(self, src, mask, src_key_padding_mask, is_causal)
        norm, self.norm = self.norm, None
        try:
            output = original(self, src, None, src_key_padding_mask, is_causal)
        finally:
            self.norm = norm
        added = F._canonical_mask(
            src_key_padding_mask, "src_key_padding_mask", None, "", src.dtype, check_other=False
        )
        hidden = torch.as_tensor(added).ne(0)
        if getattr(self, "mask_check", True):
            hidden = hidden & padded_at_the_end(hidden)
        output = output.masked_fill(hidden.unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    nn.TransformerEncoder.forward = forward  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = original  # type: ignore[method-assign]


def padded_at_the_end(hidden: Tensor) -> Tensor:
    """Return whether all rows of a mask, bool [batch, time], hide only what follows their last token; bool []."""
    return (hidden[:, 1:] | ~hidden[:, :-1]).all()
