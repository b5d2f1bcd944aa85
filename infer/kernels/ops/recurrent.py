"""Recurrent layers whose number of steps stays a symbol: LSTM, GRU and RNN as one operator.

Torch's own operators are composed of a loop over the steps, which a captured program would hold once for each step of
its sample. `recurrent` takes what `torch._VF.lstm`, `gru`, `rnn_tanh` and `rnn_relu` take, without dropout:

    x         [time, batch, features], or [batch, time, features] if `batch_first`
    states    hidden [layers * directions, batch, H] (projected: P), and of an LSTM the cell, of H
    weights   of each layer and direction [gates * H, inputs], [gates * H, H], both biases, the projection
    mode      "LSTM", "GRU", "RNN_TANH" or "RNN_RELU", as `nn.RNNBase.mode`

and gives the outputs, the last hidden states and the last cells (of an LSTM; else empty), in the shapes of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .define_op import define

Results = tuple[Tensor, Tensor, Tensor]


def _reference(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Results:
    arguments = (weights, has_biases, num_layers, 0.0, False, bidirectional, batch_first)
    if mode == "LSTM":
        results = torch.lstm(x, states, *arguments)  # type: ignore[call-overload]
    else:
        results = (*getattr(torch, mode.lower())(x, states[0], *arguments), x.new_empty(0))
    out, hidden, cell = (value.contiguous() for value in results)  # compiled graphs know no other strides
    return out, hidden, cell


def _shape(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Results:
    directions = 2 if bidirectional else 1
    out = x.new_empty((*x.shape[:2], states[0].shape[2] * directions))
    cell = x.new_empty(states[1].shape if mode == "LSTM" else 0)
    return out, x.new_empty(states[0].shape), cell


define(
    "recurrent(Tensor x, Tensor[] states, Tensor[] weights, str mode, bool has_biases, int num_layers, "
    "bool bidirectional, bool batch_first) -> (Tensor, Tensor, Tensor)",
    _reference,
    _shape,
    called=True,
)
