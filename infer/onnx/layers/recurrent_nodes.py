"""`infer::recurrent` as the operators LSTM, GRU and RNN of ONNX, one for each layer.

ONNX keeps the gates as i, o, f, c (LSTM) and z, r, h (GRU), torch as i, f, g, o and r, z, n; both biases of a direction
are one vector there; outputs are [time, directions, batch, hidden].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import NotUsableError
from ...kernels.ops.recurrent import Results

NAMES = {"LSTM": "LSTM", "GRU": "GRU", "RNN_TANH": "RNN", "RNN_RELU": "RNN"}
ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}  # gates of ONNX by their place in torch
VERSION = 14


def symbol(
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Results:
    """Decompose to symbolic nodes of the ONNX domain. Raises `NotUsableError` where ONNX has no such layer."""
    directions = 2 if bidirectional else 1
    count = len(weights) // (num_layers * directions)
    if count > 2 + 2 * has_biases:
        raise NotUsableError(
            "ONNX has no LSTM with projections (proj_size)", hint="Use --backend inductor or eager"
        )
    steps = x.transpose(0, 1) if batch_first else x
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        of_layer = range(layer * directions, (layer + 1) * directions)
        layer_weights = [weights[i * count : (i + 1) * count] for i in of_layer]
        first = [state[of_layer.start : of_layer.stop] for state in states]
        steps, *last = _layer(steps, first, layer_weights, mode)
        ends.append(tuple(last))
    hidden, *cell = (torch.cat(each) for each in zip(*ends, strict=True))
    return (
        steps.transpose(0, 1) if batch_first else steps,
        hidden,
        cell[0] if cell else x.new_empty(0),
    )


def _layer(
    steps: Tensor, states: Sequence[Tensor], weights: Sequence[Sequence[Tensor]], mode: str
) -> list[Tensor]:
    """Write one layer: outputs [time, batch, directions * hidden], then the last states."""
    name, directions = NAMES[mode], len(weights)
    hidden = weights[0][1].shape[1]

    def gates(index: int) -> Tensor:
        """Stack one tensor of all directions, gates in the order of ONNX; slices are folded where Split is not."""
        return torch.stack(
            [
                torch.cat([own[index][at * hidden : (at + 1) * hidden] for at in ORDER[name]])
                for own in weights
            ]
        )

    bias = torch.cat([gates(2), gates(3)], 1) if len(weights[0]) > 2 else None
    attributes: dict[str, Any] = {
        "hidden_size": hidden,
        "direction": "bidirectional" if directions == 2 else "forward",
        **({"linear_before_reset": 1} if name == "GRU" else {}),
        **({"activations": ["Relu"] * directions} if mode == "RNN_RELU" else {}),
    }
    time, batch = steps.shape[:2]
    end = (directions, batch, hidden)
    y, *last = torch.onnx.ops.symbolic_multi_out(
        name,
        [steps, gates(0), gates(1), bias, None, *states],
        attributes,
        dtypes=[steps.dtype] * (1 + len(states)),
        shapes=[(time, directions, batch, hidden), *[end] * len(states)],
        version=VERSION,
    )
    return [y.permute(0, 2, 1, 3).flatten(2), *last]
