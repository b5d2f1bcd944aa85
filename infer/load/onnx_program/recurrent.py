"""LSTM, GRU and RNN: torch's own layers where they compute the same, else a loop over the steps.

ONNX keeps gates as i, o, f, c (LSTM) and z, r, h (GRU); torch as i, f, g, o and r, z, n. Weights are W [directions,
gates * hidden, inputs], R [directions, gates * hidden, hidden] and B [directions, 2 * gates * hidden].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .operators import Node, operator
from .values import Unsupported, is_static

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}  # torch's gates by their place in ONNX
_DEFAULT = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = 4, 5, 6, 7


class Recurrent(nn.Module):
    """A layer of torch, called with the inputs of the ONNX operator."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer


def module_of(node: Node) -> nn.Module | None:
    """Return torch's layer of constant weights, or None where the operator is another one."""
    w, r, b = (node.constants.get(i) for i in (1, 2, 3))
    gates, names = GATES[node.op], _activations(node)
    directions = 2 if node.get("direction", "forward") == "bidirectional" else 1
    given = [bool(name) for name in node.inputs] + [False] * 8
    if w is None or r is None or (given[3] and b is None) or given[_PEEPHOLES] or given[_LENGTHS]:
        return None
    if names != _DEFAULT[node.op] * directions and not (node.op == "RNN" and names == ["Relu"] * directions):
        return None
    if node.get("clip") is not None or node.get("input_forget", 0):
        return None
    if node.op == "GRU" and not node.get("linear_before_reset", 0):
        return None  # the reset gate multiplies the state before the product, in torch after it
    hidden, inputs = r.shape[2], w.shape[2]
    if w.dtype != r.dtype or w.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return None
    kind: Any = getattr(nn, node.op)
    options = {"nonlinearity": "relu"} if names[0] == "Relu" else {}
    layer: nn.RNNBase = kind(
        inputs, hidden, bias=b is not None, bidirectional=directions == 2, dtype=w.dtype, **options
    )
    with torch.no_grad():
        for direction in range(directions):
            end = "_l0_reverse" if direction else "_l0"
            getattr(layer, f"weight_ih{end}").copy_(_ordered(node.op, w[direction]))
            getattr(layer, f"weight_hh{end}").copy_(_ordered(node.op, r[direction]))
            if b is not None:
                half = gates * hidden
                getattr(layer, f"bias_ih{end}").copy_(_ordered(node.op, b[direction][:half]))
                getattr(layer, f"bias_hh{end}").copy_(_ordered(node.op, b[direction][half:]))
    return Recurrent(layer.requires_grad_(False))


def _ordered(op: str, weight: Tensor) -> Tensor:
    parts = weight.chunk(GATES[op])
    return torch.cat([parts[i] for i in _ORDER[op]])


def call(layer: nn.Module, node: Node, inputs: list[Any]) -> tuple[Tensor | None, ...]:
    """Run torch's layer; outputs Y [time, directions, batch, hidden], Y_h and Y_c [directions, batch, hidden]."""
    own: Any = layer.layer
    inputs = [*inputs, *[None] * 8]
    x, hidden, cell = inputs[0], inputs[_HIDDEN], inputs[_CELL]
    if node.get("layout", 0):
        x, hidden, cell = (None if v is None else v.transpose(0, 1) for v in (x, hidden, cell))
    backward = node.get("direction", "forward") == "reverse"
    x = x.flip(0) if backward else x
    directions = 2 if own.bidirectional else 1
    zeros = x.new_zeros(directions, x.shape[1], own.hidden_size)
    hidden = zeros if hidden is None else hidden
    if node.op == "LSTM":
        y, (last, state) = own(x, (hidden, zeros if cell is None else cell))
    else:
        y, last = own(x, hidden)
        state = None
    y = y.reshape(*y.shape[:2], directions, -1).permute(0, 2, 1, 3)
    return _laid_out(node, y.flip(0) if backward else y, last, state)


def _laid_out(node: Node, y: Tensor, last: Tensor, state: Tensor | None) -> tuple[Tensor | None, ...]:
    if node.get("layout", 0):
        y, last = y.permute(2, 0, 1, 3), last.transpose(0, 1)
        state = None if state is None else state.transpose(0, 1)
    return y, last, state


_FUNCTIONS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "relu": lambda x, a, b: torch.relu(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "affine": lambda x, a, b: a * x + b,
    "leakyrelu": lambda x, a, b: F.leaky_relu(x, a),
    "thresholdedrelu": lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
    "hardsigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "elu": lambda x, a, b: F.elu(x, a),
    "softsign": lambda x, a, b: F.softsign(x),
    "softplus": lambda x, a, b: F.softplus(x),
}
_ALPHA = {
    "leakyrelu": 0.01,
    "thresholdedrelu": 1.0,
    "hardsigmoid": 0.2,
    "elu": 1.0,
    "affine": 1.0,
    "scaledtanh": 1.0,
}
_BETA = {"hardsigmoid": 0.5, "scaledtanh": 1.0}


def _activations(node: Node) -> list[str]:
    directions = 2 if node.get("direction", "forward") == "bidirectional" else 1
    names = node.get("activations") or _DEFAULT[node.op] * directions
    return [name.decode() if isinstance(name, bytes) else name for name in names]


def _functions(node: Node) -> list[Callable[[Tensor], Tensor]]:
    alphas, betas = list(node.get("activation_alpha") or []), list(node.get("activation_beta") or [])
    found: list[Callable[[Tensor], Tensor]] = []
    limit = float(node.get("clip", math.inf))
    for name in (name.lower() for name in _activations(node)):
        if name not in _FUNCTIONS:
            raise Unsupported(f"activation {name}")
        a = alphas.pop(0) if name in _ALPHA and alphas else _ALPHA.get(name, 0.0)
        b = betas.pop(0) if name in (*_BETA, "affine") and betas else _BETA.get(name, 0.0)
        found.append(partial(_clipped, _FUNCTIONS[name], limit, a, b))
    return found


def _clipped(
    function: Callable[[Tensor, float, float], Tensor], limit: float, a: float, b: float, x: Tensor
) -> Tensor:
    return function(x if limit == math.inf else x.clamp(-limit, limit), a, b)


@operator("LSTM", "GRU", "RNN")
def recurrent(
    node: Node,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Run the steps one by one; rows that are shorter keep their state, and give zeros after their end."""
    if node.get("layout", 0):
        x = x.transpose(0, 1)
        hidden, cell = (None if v is None else v.transpose(0, 1) for v in (hidden, cell))
    functions, size = _functions(node), r.shape[2]
    directions, each = w.shape[0], len(_DEFAULT[node.op])
    if not is_static(x.shape[0]):
        raise Unsupported("a loop over a number of steps that is not fixed")
    results = []
    for d in range(directions):
        backward = d == 1 or node.get("direction", "forward") == "reverse"
        start = x.new_zeros(x.shape[1], size)
        state = [start if hidden is None else hidden[d]]
        state += [start if cell is None else cell[d]] if node.op == "LSTM" else []
        bias = x.new_zeros(2 * GATES[node.op] * size) if b is None else b[d]
        step = _STEPS[node.op](
            node, w[d], r[d], bias, None if peepholes is None else peepholes[d], functions[d * each :]
        )
        outputs: list[Any] = [None] * x.shape[0]
        for t in reversed(range(x.shape[0])) if backward else range(x.shape[0]):
            new = step(x[t], state)
            if lengths is not None:
                alive = (lengths > t)[:, None]
                new = [torch.where(alive, n, old) for n, old in zip(new, state, strict=True)]
                outputs[t] = torch.where(alive, new[0], torch.zeros_like(new[0]))
            else:
                outputs[t] = new[0]
            state = new
        results.append((torch.stack(outputs), state))
    y = torch.stack([outputs for outputs, _ in results], 1)
    last = torch.stack([state[0] for _, state in results])
    cells = torch.stack([state[1] for _, state in results]) if node.op == "LSTM" else None
    return _laid_out(node, y, last, cells)


_Step = Callable[[Tensor, list[Tensor]], list[Tensor]]


def _lstm(node: Node, w: Tensor, r: Tensor, b: Tensor, p: Tensor | None, f: list[Any]) -> _Step:
    bias = b.reshape(2, -1).sum(0)
    size = r.shape[1]
    pi, po, pf = p.split(size) if p is not None else (0.0, 0.0, 0.0)

    def step(x: Tensor, state: list[Tensor]) -> list[Tensor]:
        h, c = state
        i, o, g, n = (x @ w.t() + h @ r.t() + bias).chunk(4, -1)
        i, new = f[0](i + pi * c), f[1](n)
        forget = 1 - i if node.get("input_forget", 0) else f[0](g + pf * c)
        c = forget * c + i * new
        return [f[0](o + po * c) * f[2](c), c]

    return step


def _gru(node: Node, w: Tensor, r: Tensor, b: Tensor, p: Tensor | None, f: list[Any]) -> _Step:
    wb, rb = b.chunk(2)
    size = r.shape[1]

    def step(x: Tensor, state: list[Tensor]) -> list[Tensor]:
        h = state[0]
        xz, xr, xh = (x @ w.t() + wb).chunk(3, -1)
        hz, hr = (h @ r[: 2 * size].t() + rb[: 2 * size]).chunk(2, -1)
        z, reset = f[0](xz + hz), f[0](xr + hr)
        if node.get("linear_before_reset", 0):
            new = f[1](xh + reset * (h @ r[2 * size :].t() + rb[2 * size :]))
        else:
            new = f[1](xh + (reset * h) @ r[2 * size :].t() + rb[2 * size :])
        return [(1 - z) * new + z * h]

    return step


def _rnn(node: Node, w: Tensor, r: Tensor, b: Tensor, p: Tensor | None, f: list[Any]) -> _Step:
    bias = b.reshape(2, -1).sum(0)
    return lambda x, state: [f[0](x @ w.t() + state[0] @ r.t() + bias)]


_STEPS: dict[str, Callable[..., _Step]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
